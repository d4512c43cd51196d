"""Which checkpoints of a run are finished. No torch here: a launcher looks too."""

from __future__ import annotations

from pathlib import Path

from configs.provenance import file_sha256

DONE = "DONE"
SEALED = ("model.safetensors", "config.json", "resume/trainer.json")  # never written again


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first."""
    found = (done.parent for done in (run_dir / "checkpoints").glob(f"step-*/{DONE}"))
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def is_unfinished(folder: Path) -> bool:
    """Whether this is a checkpoint of ours that was never finished; an export, or a released drafter, is not."""
    return (folder / "resume").exists() and not (folder / DONE).exists()


def seal(folder: Path) -> None:
    """Write DONE, which makes a checkpoint complete. `sha256sum --check DONE` reads it too."""
    sums = [f"{file_sha256(folder / name)}  {name}\n" for name in SEALED]
    (folder / DONE).write_text("".join(sums))


def require_intact(folder: Path, *names: str) -> None:
    """Raise ValueError for a file, of `names` or all, that is not the one that was sealed.

    Exports, drafters of other projects and checkpoints with an empty DONE have no seal, and pass.
    """
    if not (folder / DONE).exists():
        return
    for line in (folder / DONE).read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if name not in (names or SEALED):
            continue
        file = folder / name
        if not file.exists() or file_sha256(file) != digest:
            raise ValueError(
                f"{file} is {'damaged' if file.exists() else 'gone'}: it is not what {DONE} has the sha256 of; use "
                f"another checkpoint, or delete {folder} and train on with --resume"
            )
