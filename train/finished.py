"""Which checkpoints of a run are finished. No torch here: a launcher looks too."""

from __future__ import annotations

from pathlib import Path

DONE = "DONE"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first."""
    found = (done.parent for done in (run_dir / "checkpoints").glob(f"step-*/{DONE}"))
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def is_unfinished(folder: Path) -> bool:
    """Whether this is a checkpoint of ours that was never finished; an export, or a released drafter, is not."""
    return (folder / "resume").exists() and not (folder / DONE).exists()
