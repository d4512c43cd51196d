"""From decoded answers to one row of results.json: the acceptance length tau and how sure it is.

A round is one forward of the target that verifies a draft. It accepts some drafted tokens and adds
one of its own, the bonus token. tau counts both, as DFlash, DDTree, vLLM and SGLang do, so it is 1
for a useless drafter and block_size for a perfect one. `tau_without_bonus` is the other convention
in use; published numbers of the two differ by one.

tau pools tokens and rounds over the answers before it divides. A mean over answers would give an
answer of three tokens the weight of one of five hundred; it is reported as well, by its own name.

The second half checks what claims to be a results.json, whose rows are these.
"""

import dataclasses
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from configs.load import UserError

Json = dict[str, Any]

DECODERS = ("autoregressive", "dflash", "ddtree")
MODES = {
    "replay": "acceptance worked out from the target's stored greedy answers; nothing was timed",
    "live": "the target decoded these prompts with each decoder",
    "served": "a running engine decoded these prompts; acceptance from its own counters",
}

# Below either, `reliable` is False and no speed-up is given. Acceptance differs by half its mean
# from prompt to prompt, so fewer than 8 prompts say nothing about a data set; with 200 rounds of
# a standard deviation of 2 tokens, rounds alone blur tau by 0.3 (95 %).
MIN_PROMPTS = 8
MIN_ROUNDS = 200

# In an answer this short, the first round and the cut-off last one are most of what is measured.
SHORT_ROUNDS = 3

RESAMPLES = 2000

# An answer is called degenerate when more than this share of its 8-grams occurred before.
REPETITIVE = 0.5


@dataclass(frozen=True)
class Answer:
    """One prompt, answered by one decoder. The first token is the prefill's, of no round."""

    prompt_id: str
    committed: tuple[int, ...]  # tokens each round added, with bonus; the last may be cut short
    accepted: tuple[int, ...]  # drafted tokens each round accepted, before that cut
    tokens: int  # of the answer, the first one included
    seconds: float | None  # of decoding, without the prefill
    drafted: int = 0  # tokens that the drafter proposed


@dataclass(frozen=True)
class Row:
    """One data set under one decoder: a row of results.json. No rounds, no tau: then it is None."""

    dataset: str
    decoder: str
    budget: int | None
    temperature: float
    tau: float | None
    tau_mean_of_responses: float | None
    ci95: tuple[float, float] | None  # of tau, over prompts
    accept_at_position: tuple[float, ...]  # [k]: share of rounds that accepted more than k drafts
    histogram: tuple[int, ...]  # [k]: rounds that committed k + 1 tokens
    prompts: int
    rounds: int
    tokens: int
    tokens_per_second: float | None
    speedup: float | None
    lossless: bool | None  # None: not checked
    reliable: bool
    # A row from elsewhere may lack what follows.
    tau_quartiles_of_responses: tuple[float, float] | None = None
    tau_without_bonus: float | None = None  # mean of Answer.accepted, so without the cut either
    drafted: int | None = None
    accepted: int | None = None
    cut_rounds: int | None = None  # rounds that a stop token or the length limit cut short
    short_answers: int | None = None  # answers of fewer than SHORT_ROUNDS rounds
    repetitive_answers: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON has it: lists for tuples."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


def summarize(
    answers: Sequence[Answer],
    *,
    dataset: str,
    decoder: str,
    budget: int | None,
    temperature: float,
    block_size: int,
    lossless: bool | None,
    baseline: Sequence[Answer] | None = None,
    repetitive_answers: int | None = None,
    seed: int = 0,
) -> Row:
    """Sum up one data set's answers. Neither their order nor greedy repeats change the row.

    baseline: the autoregressive answers to the same prompts, for the speed-up.
    repetitive_answers: how many answers the caller found degenerate, see repetition_rate.
    """
    if decoder not in DECODERS:
        raise ValueError(f"decoder must be one of {DECODERS}, not {decoder!r}")
    if not answers:
        raise UserError(f"data set {dataset}: {decoder} has no answers; no prompt was usable")
    answers = _distinct(answers, temperature)
    if decoder == "autoregressive":
        answers = [_plain(answer) for answer in answers]
    for answer in answers:
        _check(answer, block_size)

    committed = np.array([c for a in answers for c in a.committed], dtype=np.int64)
    accepted = np.array([m for a in answers for m in a.accepted], dtype=np.int64)
    rounds, drafted = len(committed), sum(a.drafted for a in answers)
    if decoder != "autoregressive" and rounds > 0 and drafted == 0:
        raise UserError(
            f"data set {dataset}: the drafter proposed no token in {rounds} rounds of {decoder}, "
            "so this would measure plain decoding; check the drafter's checkpoint and dtype"
        )

    # Answers to one prompt are not independent, so the prompt is what the bootstrap draws.
    per_prompt: dict[str, list[int]] = {}
    for answer in sorted(answers, key=lambda a: a.prompt_id):
        sums = per_prompt.setdefault(answer.prompt_id, [0, 0])
        sums[0] += sum(answer.committed)
        sums[1] += len(answer.committed)
    measured = [sums for sums in per_prompt.values() if sums[1] > 0]
    means = [sum(a.committed) / len(a.committed) for a in answers if a.committed]

    reliable = rounds >= MIN_ROUNDS and len(measured) >= MIN_PROMPTS
    speed, speedup = _speed(answers), None
    if lossless and reliable and baseline is not None:
        baseline = _distinct(baseline, temperature)
        if {a.prompt_id for a in baseline} != per_prompt.keys():
            raise ValueError(f"data set {dataset}: {decoder} and its baseline differ in prompts")
        plain_speed = _speed(baseline)
        speedup = speed / plain_speed if speed and plain_speed else None

    return Row(
        dataset=dataset,
        decoder=decoder,
        budget=budget,
        temperature=temperature,
        tau=int(committed.sum()) / rounds if rounds else None,
        tau_mean_of_responses=math.fsum(means) / len(means) if means else None,
        ci95=bootstrap_interval(measured, seed) if measured else None,
        accept_at_position=tuple(
            int((accepted > k).sum()) / rounds for k in range(block_size - 1) if rounds
        ),
        histogram=tuple(np.bincount(committed, minlength=block_size + 1)[1:].tolist()),
        prompts=len(per_prompt),
        rounds=rounds,
        tokens=sum(a.tokens for a in answers),
        tokens_per_second=speed,
        speedup=speedup,
        lossless=lossless,
        reliable=reliable,
        tau_quartiles_of_responses=_percentiles(means, 25, 75) if means else None,
        tau_without_bonus=int(accepted.sum()) / rounds if rounds else None,
        drafted=drafted,
        accepted=int(accepted.sum()),
        cut_rounds=int((committed <= accepted).sum()),
        short_answers=sum(len(a.committed) < SHORT_ROUNDS for a in answers),
        repetitive_answers=repetitive_answers,
    )


def bootstrap_interval(sums: Sequence[Sequence[int]], seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap of sum(committed) / sum(rounds), drawing prompts.

    sums: (committed, rounds) of each prompt, rounds above 0. Rounds are never drawn by themselves:
    those of one prompt are alike, and the interval would come out several times too narrow.
    """
    committed, rounds = np.array(sums, dtype=np.int64).T
    draws = np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))
    ratios = committed[draws].sum(axis=1) / rounds[draws].sum(axis=1)
    return _percentiles(ratios, 2.5, 97.5)


def _percentiles(
    values: Sequence[float] | NDArray[np.float64], low: float, high: float
) -> tuple[float, float]:
    at_low, at_high = np.percentile(values, [low, high])
    return float(at_low), float(at_high)


def repetition_rate(tokens: Sequence[int], n: int = 8) -> float:
    """Share of an answer's n-grams that occurred in it before; 0 if it has no n-gram.

    A looping answer comes near 1. Loops are easy to draft: they lift tau and mean nothing.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _distinct(answers: Sequence[Answer], temperature: float) -> list[Answer]:
    """Drop greedy repeats of an answer (a padded batch, a run twice): they measure nothing new."""
    if temperature > 0:
        return list(answers)
    first: dict[tuple[Any, ...], Answer] = {}
    for answer in answers:
        first.setdefault(
            (answer.prompt_id, answer.committed, answer.accepted, answer.tokens), answer
        )
    return list(first.values())


def _plain(answer: Answer) -> Answer:
    """Plain decoding as rounds: every forward after the prefill commits one token."""
    rounds = answer.tokens - 1
    return dataclasses.replace(answer, committed=(1,) * rounds, accepted=(0,) * rounds, drafted=0)


def _check(answer: Answer, block_size: int) -> None:
    """Refuse counts that no decoding can have: they come from a bug in a decode loop."""
    whole = tuple(m + 1 for m in answer.accepted)  # what each round commits unless it is cut
    if not (
        len(whole) == len(answer.committed)
        and all(1 <= w <= block_size for w in whole)
        and answer.committed[:-1] == whole[:-1]
        and all(1 <= c <= w for c, w in zip(answer.committed[-1:], whole[-1:], strict=True))
        and answer.tokens == 1 + sum(answer.committed)
        and (answer.drafted == 0 or answer.drafted >= sum(answer.accepted))
    ):
        raise ValueError(f"impossible counts at block size {block_size}: {answer}")


def _speed(answers: Sequence[Answer]) -> float | None:
    """Pooled tokens per second; the first token is not counted, as the prefill's time is not."""
    times = [a.seconds for a in answers if a.seconds is not None]
    total = math.fsum(times)
    if len(times) < len(answers) or total <= 0:
        return None
    return sum(a.tokens - 1 for a in answers) / total


# What results.json must hold; _fits says how a type is read.
SCHEMA = 1
TOP: Json = {"schema": int, "mode": str, "checkpoint": dict, "target": dict, "provenance": dict}
TOP |= {"rows": tuple[Json, ...], "lossless_check": Json | None, "notes": tuple[str, ...]}
CHECKPOINT: Json = {"path": str, "step": int | None, "fingerprint": str | None}


def validate_results(obj: object) -> Json:
    """Return obj if it is what results.json may hold. Raises UserError with the bad field's path.

    Unknown keys are refused in a row and left alone elsewhere.
    """
    _need(isinstance(obj, dict), "the file", "an object", obj)
    results: Json = obj  # type: ignore[assignment]
    _check_fields(results, "", TOP, {"lossless_check", "notes"})
    _need(results["schema"] == SCHEMA, "schema", str(SCHEMA), results["schema"])
    _need(results["mode"] in MODES, "mode", " or ".join(MODES), results["mode"])
    _check_fields(results["checkpoint"], "checkpoint", CHECKPOINT, set())
    _check_rows(results["rows"])
    return results


def _check_rows(rows: Sequence[Json]) -> None:
    """Check what results.json holds for Rows. Raises UserError with the bad field's path."""
    types = get_type_hints(Row)
    optional = {f.name for f in dataclasses.fields(Row) if f.default is not dataclasses.MISSING}
    seen: dict[tuple[Any, ...], int] = {}
    for i, row in enumerate(rows):
        at = f"rows[{i}]"
        _check_fields(row, at, types, optional)
        for unknown in row.keys() - types.keys():
            _need(False, f"{at}.{unknown}", "left out (no such field)", row[unknown])
        _check_values(row, at)
        key = row["dataset"], row["decoder"], row["budget"], row["temperature"]
        first = seen.setdefault(key, i)
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
