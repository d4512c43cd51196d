"""results.json: what it must hold, its readers and writers, and what its parts are called."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from configs.load import UserError
from configs.provenance import atomic_write_json, fingerprint
from eval.metrics import DECODERS, MODES, Json, Row
from eval.published import Point, published

# What results.json must hold; _fits says how a type is read.
SCHEMA = 1
SEAL = "fingerprint"
TOP: Json = {"schema": int, "mode": str, "checkpoint": dict, "target": dict, "provenance": dict}
TOP |= {"rows": tuple[Json, ...], "lossless_check": Json | None, "notes": tuple[str, ...]}
TOP |= {"max_new_tokens": int | None, "sampling": Json | None}
OPTIONAL = {"lossless_check", "notes", "max_new_tokens", "sampling"}
CHECKPOINT: Json = {"path": str, "step": int | None, "fingerprint": str | None}
PROMPT: Json = {"id": str, "committed": int, "rounds": int}

Key = tuple[str, str, int | None, float]  # data set, decoder, budget, temperature


def write_results(folder: Path, results: Json) -> Path:
    """Check results and write folder/results.json in one piece. Raises UserError."""
    validate_results(results)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    as_read = json.loads(json.dumps(results))
    atomic_write_json(path, as_read | {SEAL: fingerprint(as_read)})
    return path


def read_results(path: Path) -> Json:
    """Return a checked results.json. Raises UserError that names the file.

    One without a fingerprint is nobody's but its writer's to vouch for, and is read.
    """
    try:
        results = validate_results(json.loads(path.read_bytes()))
        seal = results.pop(SEAL, None)
        if seal is not None and seal != fingerprint(results):
            raise UserError(
                f"a value was changed after it was written (fingerprint {seal}); move it away and evaluate again"
            )
        return results
    except (UserError, OSError, ValueError, RecursionError) as error:  # the last: "[[[[[[..."
        raise UserError(f"cannot read {path}: {error}") from None


def latest_results(run_dir: Path) -> list[Json]:
    """Results of all evaluations in a run folder, by step and mode.

    They lie in evals/step-*/ or one folder deeper. What cannot be read is named on stderr.
    """
    found = []
    for folder in sorted((run_dir / "evals").glob("step-*")):
        for path in [*folder.glob("**/results.json")] or [folder / "results.json"]:
            try:
                found.append(read_results(path))
            except UserError as error:
                print(f"skipped: {error}", file=sys.stderr)
    return sorted(found, key=lambda results: (_order(results), results["mode"]))


def validate_results(obj: object) -> Json:
    """Return obj if it is what results.json may hold. Raises UserError with the bad field's path.

    Unknown keys are refused in a row and left alone elsewhere.
    """
    _need(isinstance(obj, dict), "the file", "an object", obj)
    assert isinstance(obj, dict)
    results: Json = obj
    _check_fields(results, "", TOP, OPTIONAL)
    _need(results["schema"] == SCHEMA, "schema", str(SCHEMA), results["schema"])
    _need(results["mode"] in MODES, "mode", " or ".join(MODES), results["mode"])
    _check_fields(results["checkpoint"], "checkpoint", CHECKPOINT, set())
    _check_rows(results["rows"])
    return results


def _check_rows(rows: Sequence[Json]) -> None:
    """Check what results.json holds for Rows. Raises UserError with the bad field's path."""
    types = get_type_hints(Row)
    optional = {f.name for f in dataclasses.fields(Row) if f.default is not dataclasses.MISSING}
    seen: dict[Key, int] = {}
    for i, row in enumerate(rows):
        at = f"rows[{i}]"
        _check_fields(row, at, types, optional)
        for unknown in row.keys() - types.keys():
            _need(False, f"{at}.{unknown}", "left out (no such field)", row[unknown])
        _check_values(row, at)
        first = seen.setdefault(key_of(row), i)
        _need(first == i, at, f"another decoding than rows[{first}]", row)


def _check_values(row: Json, at: str) -> None:
    _need(row["decoder"] in DECODERS, f"{at}.decoder", " or ".join(DECODERS), row["decoder"])
    tree = row["decoder"] == "ddtree"
    _need(not tree or bool(row["budget"]), f"{at}.budget", "the tree's node count", row["budget"])
    bars, rounds, interval = row["histogram"], row["rounds"], row["ci95"]
    _need(not bars or sum(bars) == rounds, f"{at}.histogram", f"{rounds} rounds in all", bars)
    for key in ("tau", "tau_mean_of_responses"):
        tau, where = row[key], f"{at}.{key}"
        _need((tau is None) == (rounds == 0), where, "null if and only if rounds is 0", tau)
        _need(tau is None or tau >= 1, where, "at least 1, as it counts the bonus token", tau)
        _need(not bars or (tau or 1) <= len(bars), where, f"at most {len(bars)}", tau)
    rises = interval is None or 1 <= interval[0] <= interval[1]
    _need(rises, f"{at}.ci95", "[low, high] with 1 <= low <= high", interval)
    shares = [1, *row["accept_at_position"]]
    falls = shares == sorted(shares, reverse=True)
    _need(falls, f"{at}.accept_at_position", "shares that never rise", shares[1:])
    earned = row["lossless"] is True and row["reliable"]
    wanted = "null unless lossless and reliable are true"
    _need(earned or row["speedup"] is None, f"{at}.speedup", wanted, row["speedup"])
    if row.get("per_prompt") is not None:
        _check_prompts(row, f"{at}.per_prompt")


def _check_prompts(row: Json, at: str) -> None:
    """Check that the prompts' sums are those of the row."""
    prompts: list[Json] = row["per_prompt"]
    for i, prompt in enumerate(prompts):
        _check_fields(prompt, f"{at}[{i}]", PROMPT, set())
        enough = prompt["committed"] >= prompt["rounds"]
        _need(enough, f"{at}[{i}].committed", "at least a token a round", prompt["committed"])
    names = {prompt["id"] for prompt in prompts}
    _need(len(names) == len(prompts) == row["prompts"], at, f"{row['prompts']} prompts", prompts)
    rounds = sum(prompt["rounds"] for prompt in prompts)
    _need(rounds == row["rounds"], at, f"{row['rounds']} rounds in all", prompts)
    tau = sum(prompt["committed"] for prompt in prompts) / rounds if rounds else 1.0
    _need(math.isclose(tau, row["tau"] or 1.0), at, f"sums of tau {row['tau']}", prompts)


def _check_fields(obj: Json, at: str, types: Json, optional: Set[str]) -> None:
    """Check the types of an object's fields. Raises UserError with the bad field's path."""
    for key, kind in types.items():
        wanted = _in_words(kind)
        _need(key in obj or key in optional, f"{at}.{key}", wanted, "missing")
        _need(key not in obj or _fits(obj[key], kind), f"{at}.{key}", wanted, obj.get(key))


def _need(good: bool, where: str, wanted: str, value: object) -> None:
    """Raise UserError, for the value at `where` in results.json, unless good."""
    if not good:
        brief = _fits(value, float | str | bool | None) or isinstance(value, float)
        shown = repr(value)[:60] if brief else f"this {type(value).__name__}"
        raise UserError(f"results.json: {where.lstrip('.')} must be {wanted}, not {shown}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a type. Numbers are finite and not negative; a tuple is a list."""
    parts = get_args(kind)
    if isinstance(kind, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            return False
        if parts[-1] is not ...:
            return len(value) == len(parts) and all(map(_fits, value, parts))
        return all(_fits(item, parts[0]) for item in value)
    if get_origin(kind) is dict and parts[1] is not Any:
        return isinstance(value, dict) and all(_fits(item, parts[1]) for item in value.values())
    if kind in (int, float):
        numbers = int if kind is int else int | float
        # Comparisons alone: False for NaN, and exact where float() of a huge int would overflow.
        good = isinstance(value, numbers) and not isinstance(value, bool)
        return good and bool(0 <= value < 1e300)
    return isinstance(value, get_origin(kind) or kind)


def _in_words(kind: Any) -> str:
    """What _fits asks for, as the reader of an error message knows it."""
    if isinstance(kind, UnionType):
        return " or ".join(map(_in_words, get_args(kind)))
    words = {str: "text", bool: "true or false", NoneType: "null", dict: "an object"}
    words |= {int: "a whole number from 0 on", float: "a number from 0 on", tuple: "a list"}
    return words[get_origin(kind) or kind]


# What its parts are called, and in which order they are shown.


def invalid_rows(results: Json) -> list[str]:
    """What a command must not end with success for: rows whose text is not plain decoding's."""
    return [f"{r['dataset']}, {decoder_name(r)}" for r in results["rows"] if r["lossless"] is False]


def key_of(row: Json) -> Key:
    """What a results.json holds one row of."""
    return row["dataset"], row["decoder"], row["budget"], row["temperature"]


def kind_of(row: Json) -> str:
    tree = f"DDTree {row['budget']}"
    return {"autoregressive": "plain", "dflash": "DFlash chain", "ddtree": tree}[row["decoder"]]


def decoder_name(row: Json) -> str:
    return kind_of(row) + (f" T={row['temperature']:g}" if row["temperature"] > 0 else "")


def subject(results: Json, steps: str | None = None) -> str:
    """Target, checkpoint (or what `steps` says of several), mode and decoding, in one line."""
    parts = target_name(results), steps or step_name(results), results["mode"], decoding(results)
    return " | ".join(parts)


def data_of(results: Json) -> str:
    """Which held-out prompts, how many of each set, and how long their answers may be."""
    sets = ", ".join(f"{n} {max(r['prompts'] for r in g)}" for n, g in by_data_set(results).items())
    limit = results.get("max_new_tokens")
    return f"prompts: {sets}" + (f"; answers of up to {limit} tokens" if limit else "")


def decoding(results: Json) -> str:
    """Greedy, or the temperatures."""
    heats = sorted({row["temperature"] for row in results["rows"]})
    return ", ".join(f"temperature {t:g}" if t > 0 else "greedy" for t in heats) or "no rows"


def target_name(results: Json) -> str:
    target = results["target"]
    named = (target[k] for k in ("name", "id", "path", "package") if target.get(k))
    return str(next(named, "unnamed target")).rstrip("/").rsplit("/", 1)[-1]


def step_name(results: Json) -> str:
    step = results["checkpoint"]["step"]
    return "external drafter" if step is None else f"step {step}"


def nodes_of(row: Json) -> int:
    """Drafted nodes per round: a chain has block_size - 1."""
    return int(row["budget"] or max(len(row["histogram"]) - 1, 1))


def by_data_set(results: Json) -> dict[str, list[Json]]:
    """The rows to show: not those without rounds, and not what is not lossless."""
    groups: dict[str, list[Json]] = {}
    for row in sorted(results["rows"], key=nodes_of):
        if row["tau"] is not None and row["lossless"] is not False:
            heat = f" T={row['temperature']:g}" if row["temperature"] > 0 else ""
            groups.setdefault(row["dataset"] + heat, []).append(row)
    return groups


def timeline_of(results: Json, history: Sequence[Json]) -> list[Json]:
    """The checkpoints of a run, by step, as far as they were measured in the same mode."""
    same = [r for r in (*history, results) if r["mode"] == results["mode"]]
    return sorted({_order(r): r for r in same}.values(), key=_order)


def published_of(results: Json, rows: Sequence[Json]) -> list[Point]:
    """What others published for the data set of these rows; they all decoded greedily, non-thinking."""
    if rows[0]["temperature"] > 0 or results["target"].get("enable_thinking") is True:
        return []
    return published(target_name(results), rows[0]["dataset"])


@dataclass(frozen=True)
class PhaseTimes:
    """What a decoder's rounds cost, over all data sets."""

    decoder: str
    rounds: int
    tau: float
    phases: dict[str, float]  # seconds of a round


def phase_times(results: Json) -> list[PhaseTimes]:
    """The decoders that were timed, plain decoding first, then by size of the draft."""
    timed: dict[str, list[Json]] = {}
    rows = [row for group in by_data_set(results).values() for row in group]
    for row in sorted(rows, key=lambda row: (DECODERS.index(row["decoder"]), nodes_of(row))):
        if row.get("phase_seconds"):
            timed.setdefault(decoder_name(row), []).append(row)
    out = []
    for name, group in timed.items():
        rounds = sum(row["rounds"] for row in group)
        phases: dict[str, float] = {}
        for row in group:
            for phase, seconds in row["phase_seconds"].items():
                phases[phase] = phases.get(phase, 0.0) + seconds * row["rounds"] / rounds
        tau = sum(row["tau"] * row["rounds"] for row in group) / rounds
        out.append(PhaseTimes(name, rounds, tau, phases))
    return out


def _order(results: Json) -> int:
    step: int | None = results["checkpoint"]["step"]
    return -1 if step is None else step
