"""Is one drafter better than another? Paired by prompt, with an interval of the difference.

    python eval/main.py compare runs/a runs/b
    python eval/main.py compare runs/a/evals/step-000100 runs/a/evals/step-000200 --output compared

Prompts differ far more than drafters do. A drafter's own interval is mostly the spread of the prompts, and two of them
overlap long after the difference is certain; prompt against prompt, that spread cancels.
"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from configs.load import UserError
from configs.provenance import atomic_write_json, atomic_write_text
from eval.metrics import MIN_PROMPTS, MIN_ROUNDS, Json, bootstrap_difference
from eval.results import (
    Key,
    decoder_name,
    key_of,
    latest_results,
    read_results,
    step_name,
    target_name,
)
from eval.tables import aligned, escaped, fixed, markdown_table

HEADINGS = "data set|decoder|tau A|tau B|B - A [95 %]|better|prompts|left out"
SIDES = "<<>>><>>"
EXPLAINED = (
    "tau counts the bonus token and is pooled over the prompts that both answered; the interval is a 95 % bootstrap over "
    "those prompts, with the same draws for both. Of 20 lines without a difference, one is expected to show one."
)
# What must agree before a difference is the drafter's. A fingerprint says more than the name of a folder.
TARGET = ("fingerprint", "dtype", "enable_thinking", "template_hash")
INVALID = "INVALID, not lossless"


@dataclass(frozen=True)
class Pair:
    """One data set under one decoder, by both."""

    dataset: str
    decoder: str
    budget: int | None
    temperature: float
    prompts: int  # in both, with at least a round in both
    left_out: int  # prompts that only one has, or that have no round
    tau_a: float
    tau_b: float
    difference: float  # tau_b - tau_a
    ci95: tuple[float, float]  # of the difference
    verdict: str  # "A", "B", "no clear difference", or why there is none


def main(argv: Sequence[str]) -> int | None:
    args = parser().parse_args(argv)
    a, b = find_results(args.a), find_results(args.b)
    pairs = compare(a, b)
    heading = f"{target_name(a)}, {a['mode']}"
    sides = [
        f"{side}: {results['checkpoint']['path']}, {step_name(results)}"
        for side, results in (("A", a), ("B", b))
    ]
    table = [HEADINGS.split("|"), *map(_cells, pairs)]
    remarks = [*_unpaired(a, b), EXPLAINED]
    print(heading, *sides, aligned(table, SIDES), *remarks, sep="\n")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "eval/main.py", "compare", *argv])
        parts = [f"# {escaped(heading)}: A against B", "\n".join(f"- {escaped(x)}" for x in sides)]
        parts += [
            markdown_table(table, SIDES),
            *map(escaped, remarks),
            f"```bash\n{command}\n```\n",
        ]
        atomic_write_text(args.output / "compare.md", "\n\n".join(parts))
        record = {"schema": 1, "command": command, "mode": a["mode"]}
        record |= {"a": a["checkpoint"], "b": b["checkpoint"], "rows": [*map(asdict, pairs)]}
        atomic_write_json(args.output / "compare.json", record)
        print(f"written: {args.output / 'compare.md'}")
    return 1 if any(pair.verdict == INVALID for pair in pairs) else None


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="eval/main.py compare",
        description="Compare the acceptance lengths of two drafters prompt by prompt. A and B are each a results.json, a "
        "folder that holds one (evals/step-000200, evals/step-000200/live), a checkpoint (its replay results) or a run "
        "folder (the replay results of its last evaluated checkpoint).",
        epilog="example: python eval/main.py compare runs/a runs/b",
    )
    out.add_argument("a", metavar="A", type=Path, help="what is compared with")
    out.add_argument("b", metavar="B", type=Path, help="what is compared; + means that B is longer")
    out.add_argument(
        "--output", metavar="FOLDER", type=Path, help="write compare.md and compare.json there too"
    )
    return out


def find_results(path: Path) -> Json:
    """The results that a path means, see --help. Raises UserError where there are none."""
    if path.is_file():
        return read_results(path)
    if (path / "results.json").is_file():
        return read_results(path / "results.json")
    checkpoints = path.absolute().parent  # which may be a link to another disk: the run is here
    if checkpoints.name == "checkpoints":
        results = checkpoints.parent / "evals" / path.resolve().name / "results.json"
        if not results.is_file():
            raise UserError(f"{path} has no replay results ({results}); evaluate it first")
        return read_results(results)
    replays = [r for r in latest_results(path) if r["mode"] == "replay"]
    if not replays:
        raise UserError(
            f"{path} is neither a results.json, a folder with one, a checkpoint nor a run with replay results; "
            "evaluate it with eval/main.py first"
        )
    return replays[-1]


def compare(a: Json, b: Json, seed: int = 0) -> list[Pair]:
    """What both measured, paired. Raises UserError where a difference would not be the drafter's."""
    _same_conditions(a, b)
    rows_a, rows_b = _drafted(a), _drafted(b)
    shared = [key for key in rows_a if key in rows_b]
    if not shared:
        raise UserError(
            f"nothing to compare: A has {_listed(rows_a)} and B has {_listed(rows_b)}; "
            "evaluate both on the same data sets with the same budgets"
        )
    return [_pair(rows_a[key], rows_b[key], a["mode"], seed) for key in shared]


def _pair(a: Json, b: Json, mode: str, seed: int) -> Pair:
    where = f"{a['dataset']}, {decoder_name(a)}"
    sums_a, sums_b = _sums(a, f"A ({where})"), _sums(b, f"B ({where})")
    both = sorted(sums_a.keys() & sums_b.keys())
    if not both:
        raise UserError(
            f"cannot compare {where}: none of A's {len(sums_a)} prompts is among B's {len(sums_b)}; "
            "evaluate both on the same prompts"
        )
    if mode == "replay":  # what is replayed is the target's text, whoever drafts it
        for name in both:
            one, other = sums_a[name][0], sums_b[name][0]
            if one != other:
                raise UserError(
                    f"cannot compare {where}: the answer to {name} has {one + 1} tokens in A and "
                    f"{other + 1} in B, so these are not the same answers; extract one set and evaluate both on it"
                )
    measured = [name for name in both if sums_a[name][1] and sums_b[name][1]]
    pairs_a, pairs_b = [sums_a[name] for name in measured], [sums_b[name] for name in measured]
    if not measured:
        raise UserError(f"cannot compare {where}: no answer to a shared prompt has a round")
    tau_a, tau_b = _tau(pairs_a), _tau(pairs_b)
    low, high = bootstrap_difference(pairs_a, pairs_b, seed)
    rounds = min(sum(r for _, r in pairs) for pairs in (pairs_a, pairs_b))
    if a["lossless"] is False or b["lossless"] is False:
        verdict = INVALID
    elif len(measured) < MIN_PROMPTS or rounds < MIN_ROUNDS:
        verdict = "too few prompts or rounds"
    else:
        verdict = "B" if low > 0 else "A" if high < 0 else "no clear difference"
    return Pair(
        dataset=a["dataset"],
        decoder=a["decoder"],
        budget=a["budget"],
        temperature=a["temperature"],
        prompts=len(measured),
        left_out=len(sums_a.keys() | sums_b.keys()) - len(measured),
        tau_a=tau_a,
        tau_b=tau_b,
        difference=tau_b - tau_a,
        ci95=(low, high),
        verdict=verdict,
    )


def _sums(row: Json, name: str) -> dict[str, tuple[int, int]]:
    """(committed, rounds) by prompt."""
    if row.get("per_prompt") is None:
        raise UserError(
            f"the results of {name} have no sums per prompt; evaluate again with --again"
        )
    return {p["id"]: (p["committed"], p["rounds"]) for p in row["per_prompt"]}


def _tau(sums: Sequence[tuple[int, int]]) -> float:
    return sum(c for c, _ in sums) / sum(r for _, r in sums)


def _drafted(results: Json) -> dict[Key, Json]:
    return {key_of(r): r for r in results["rows"] if r["decoder"] != "autoregressive"}


def _listed(rows: dict[Key, Json]) -> str:
    return "; ".join(f"{r['dataset']}, {decoder_name(r)}" for r in rows.values()) or "no rows"


def _same_conditions(a: Json, b: Json) -> None:
    conditions = {"mode": (a["mode"], b["mode"])}
    conditions["longest answer"] = (a.get("max_new_tokens"), b.get("max_new_tokens"))
    conditions["sampling"] = (a.get("sampling"), b.get("sampling"))
    for key in TARGET:
        conditions[f"target {key.replace('_', ' ')}"] = a["target"].get(key), b["target"].get(key)
    if None in conditions["target fingerprint"]:
        conditions["target"] = target_name(a), target_name(b)
    for name, (one, other) in conditions.items():
        if one != other:
            known_one, known_other = ("unset" if x is None else x for x in (one, other))
            raise UserError(
                f"cannot compare: the {name} of A is {known_one} and that of B is {known_other}; "
                "evaluate both in the same way"
            )


def _cells(pair: Pair) -> list[str]:
    interval = "{:+.2f} [{:+.2f}, {:+.2f}]".format(pair.difference, *pair.ci95)
    taus = fixed(pair.tau_a), fixed(pair.tau_b)
    counts = str(pair.prompts), str(pair.left_out)
    return [pair.dataset, decoder_name(asdict(pair)), *taus, interval, pair.verdict, *counts]


def _unpaired(a: Json, b: Json) -> list[str]:
    """A sentence for each side that has rows which the other lacks."""
    rows = {"A": _drafted(a), "B": _drafted(b)}
    alone = {
        side: {k: r for k, r in rows[side].items() if k not in rows[other]}
        for side, other in ("AB", "BA")
    }
    return [
        f"only in {side}, not compared: {_listed(missing)}"
        for side, missing in alone.items()
        if missing
    ]
