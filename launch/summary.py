"""What a finished run amounts to, read from its results files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def run_summary(run_dir: Path) -> str:
    """Held-out acceptance of the first and the last checkpoint, and what live decoding found."""
    replays = [_read(file) for file in sorted(run_dir.glob("evals/step-*/results.json"))]
    replays.sort(key=lambda r: r["checkpoint"]["step"])
    if not replays:
        return f"no results in {run_dir}/evals yet"
    first, last = replays[0], replays[-1]
    budgets = [
        row["budget"] for row in last["rows"] if row["dataset"] == last["rows"][0]["dataset"]
    ]
    heads = ["DFlash" if b is None else f"DDTree {b}" for b in budgets]
    lines = [
        f"acceptance length (tau, bonus token included) on held-out prompts, step {last['checkpoint']['step']}"
        f" (in brackets: step {first['checkpoint']['step']})",
        f"{'data set':<12}" + "".join(f"{h:>20}" for h in heads),
    ]
    for name in dict.fromkeys(row["dataset"] for row in last["rows"]):
        new, old = _taus(last, name), _taus(first, name)
        lines.append(f"{name:<12}" + "".join(f"{_cell(new[b], old.get(b)):>20}" for b in budgets))
    for file in sorted(run_dir.glob("evals/step-*/live/results.json")):
        check = _read(file).get("lossless_check") or {}
        if "compared_tokens" in check:
            lines.append(
                f"live decoding at {file.parent.parent.name}, {check['dtype']}: {check['compared_tokens']:,} tokens "
                f"compared with plain greedy decoding, {check['answers_that_differ']} answers differ"
            )
    lines.append(f"report: {run_dir}/evals/step-{last['checkpoint']['step']:06d}/report.md")
    return "\n".join(lines)


def _read(file: Path) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return out


def _taus(results: dict[str, Any], dataset: str) -> dict[int | None, float]:
    return {row["budget"]: row["tau"] for row in results["rows"] if row["dataset"] == dataset}


def _cell(new: float, old: float | None) -> str:
    return f"{new:.2f}" if old is None else f"{new:.2f} ({old:.2f})"
