"""A long training run stays as it began: memory, open files, disk. `make soak` runs 2,000 steps, CI 200."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from configs.load import load_config
from tests.test_pipeline import ROOT, copy_run, extracted, metrics
from train.finished import complete_checkpoints

__all__ = ["extracted"]  # a fixture
STEPS = int(os.environ.get("PACELINE_SOAK", "200"))
CHECKPOINTS, KEEP = (50, 3) if STEPS >= 1000 else (10, 3)


class Seen(NamedTuple):
    step: int
    resident: int  # bytes
    files: int  # open
    checkpoints: int
    disk: int  # bytes


def look(pid: int, run_dir: Path) -> Seen | None:
    """None when the process has just ended, or a checkpoint went while it was counted."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        resident = int(status.split("VmRSS:")[1].split()[0]) * 1024
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        disk = sum(f.stat().st_size for f in run_dir.rglob("*") if f.is_file())
        log = run_dir / "metrics.jsonl"
        steps = log.read_bytes().count(b"\n") if log.exists() else 0
        return Seen(steps, resident, files, len(complete_checkpoints(run_dir)), disk)
    except (OSError, IndexError):
        return None


@pytest.mark.slow
def test_a_long_run_keeps_its_memory_its_open_files_and_its_disk(
    extracted: Path, tmp_path: Path
) -> None:
    config = copy_run(
        extracted, tmp_path, max_steps=STEPS, epochs=STEPS, max_length=48, batch_size=1, keep_checkpoints=KEEP,
        checkpoint_every=STEPS // CHECKPOINTS,
    )  # fmt: skip
    run_dir, began = Path(load_config(config).run_dir), time.monotonic()
    with (tmp_path / "out").open("w+") as out:
        process = subprocess.Popen(
            [sys.executable, "train/main.py", "--config", str(config)],
            cwd=ROOT,
            stdout=out,
            stderr=out,
        )
        seen: list[Seen] = []
        while process.poll() is None:
            if found := look(process.pid, run_dir):
                seen.append(found)
            time.sleep(0.02 if STEPS < 1000 else 0.1)
    said = (tmp_path / "out").read_text()
    assert process.returncode == 0, said
    assert said.count("checkpoint: ") == CHECKPOINTS
    assert [m["step"] for m in metrics(run_dir)] == list(range(1, STEPS + 1))

    early = [s for s in seen if STEPS // 4 <= s.step < STEPS // 2]
    late = [s for s in seen if s.step >= STEPS * 3 // 4]
    assert len(early) > 10 and len(late) > 10

    def typical(name: str) -> tuple[float, float]:
        return median(getattr(s, name) for s in early), median(getattr(s, name) for s in late)

    (before, after), (open_before, open_after) = typical("resident"), typical("files")
    size = sum(
        f.stat().st_size for f in complete_checkpoints(run_dir)[-1].rglob("*") if f.is_file()
    )
    fixed = early[0].disk - early[0].checkpoints * size
    most = max(s.disk for s in seen)
    print(
        f"\nsoak: {STEPS} steps, {CHECKPOINTS} checkpoints, {time.monotonic() - began:.0f} s, {len(seen)} looks; "
        f"resident {before / 1e6:.1f} -> {after / 1e6:.1f} MB ({(after - before) / STEPS * 2 / 1e3:+.2f} KB a step), "
        f"open files {open_before:.0f} -> {open_after:.0f} (most {max(s.files for s in early + late)}), "
        f"checkpoints at most {max(s.checkpoints for s in seen)} of {KEEP} kept, disk at most {most / 1e6:.1f} MB "
        f"({size / 1e6:.2f} MB a checkpoint)"
    )
    assert after < before + 16e6
    assert open_after <= open_before
    assert max(s.files for s in late) <= max(s.files for s in early) + 2
    assert max(s.checkpoints for s in seen) <= KEEP + 1  # a new one stands before the oldest goes
    assert (
        most < fixed + (KEEP + 2) * size + STEPS * 1000
    )  # and metrics.jsonl, which grows by the step
