"""tau is low: is it a bug, and which? The causes that look alike, one after the other, each measured.

    python eval/main.py --config configs/mine.yaml --doctor

Reads stored states and the checkpoint; the target is loaded for what only it can say. A cause upstream makes others look
ill, so the first suspect is the one to mend. docs/reading-the-report.md says what each of them looks like.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from configs.schema import Config
from eval import check_drafts, check_states
from eval.patient import SUSPECT, UNKNOWN, Case, Finding, NotCheckable
from eval.replay import replay

FALLING = 0.01  # of the loss, within the last quarter of training; a finished cosine schedule ends flatter than that
Check = Callable[[Case], Finding]

CHECKS: dict[str, Check] = {
    "states": check_states.states,
    "target": check_states.target,
    "taps": check_states.taps,
    "head": check_states.head,
    "prompts": check_states.prompts,
    "answers": check_states.answers,
    "slots": check_drafts.slots,
    "sliding": check_drafts.sliding,
    "rope": check_drafts.rope,
    "recurrent": check_drafts.recurrent,
    "overfit": check_drafts.overfit,
}


def run(config: Config, folder: Path) -> int:
    """Print a line a check and the verdict. Status 1 when anything is suspect. UserError as loading does."""
    case = Case(config, folder)
    count = sum(map(len, case.read.values()))
    print(
        f"{folder}: {count} samples of {', '.join(case.read)}, in {config.eval.dtype}", flush=True
    )
    suspects = []
    for name, check in CHECKS.items():
        try:
            found = check(case)
        except NotCheckable as reason:
            found = Finding(name, UNKNOWN, why=str(reason))
        print(found, flush=True)
        suspects += [found.name] if found.verdict == SUSPECT else []
    if suspects:
        rest = f"; {', '.join(suspects[1:])} may only follow from it" if suspects[1:] else ""
        print(f"look at {suspects[0]} first{rest} (docs/reading-the-report.md)")
        return 1
    print(innocent(case))
    return 0


def innocent(case: Case) -> str:
    """What there is to say of a drafter with which nothing is wrong."""
    try:
        answers = case.sound(*case.held_out)
    except NotCheckable as reason:
        return f"nothing is suspect, and tau is not known: {reason}"
    rounds = [n for s in answers for n in replay(case.drafter, case.head, s, [])[None].committed]
    tau, size = sum(rounds) / max(len(rounds), 1), 1 + case.drafter.shape.drafts
    # fewer than half of the drafts accepted
    weak = "the drafter is weak: " if tau < (1 + size) / 2 else ""
    measured = f"tau {tau:.2f} of at most {size} on {len(answers)} held-out answers"
    return f"nothing is wrong; {weak}{measured}; {progress(case.run_dir)}"


def progress(run_dir: Path) -> str:
    """Whether training would have gone on gaining, by its log."""
    try:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return f"no readable metrics.jsonl in {run_dir} says how far training went"
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    if len(losses) < 8:
        return f"{len(losses)} logged steps are too few to tell whether more training would help"
    quarter = losses[-(len(losses) // 4) :]
    half = len(quarter) // 2
    before, after = (
        sum(loss for _, loss in part) / len(part) for part in (quarter[:half], quarter[half:])
    )
    said = f"loss {before:.3f} -> {after:.3f} within the last quarter of {losses[-1][0]} steps, "
    if before - after > FALLING * before:
        return said + "still falling: train longer"
    return (
        said + "flat: more prompts, a larger drafter or train.distillation, rather than more steps"
    )
