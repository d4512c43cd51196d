"""Disks that fill up or fail, clocks that jump, processes that are killed or started twice: while training, and after."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import eval.report
import train.checkpoint
from configs.load import load_config, main_guard
from configs.provenance import FolderLock
from eval.done import reported
from eval.report import write_report
from tests.conftest import family
from tests.test_eval_report import RESULTS
from tests.test_extract_shards import small_disk
from tests.test_pipeline import ROOT, copy_run, extracted, metrics, run
from tests.test_train_checkpoint import fake, names, trained
from tests.test_train_state import command
from tests.test_train_zero import rank_of
from train.checkpoint import delete_old, find_checkpoint, load_checkpoint, save_checkpoint
from train.finished import complete_checkpoints, require_intact

__all__ = ["extracted", "small_disk"]  # fixtures


class Run:
    def __init__(self) -> None:
        self.accelerator, self.model, self.optimizer = trained(1)

    def save(self, folder: Path, step: int) -> Path:
        return save_checkpoint(
            folder, self.accelerator, self.model, self.optimizer, step=step, card="", trainer={}, keep=99
        )  # fmt: skip

    def whole(self, folder: Path) -> list[str]:
        for checkpoint in complete_checkpoints(folder):
            require_intact(checkpoint)
            load_checkpoint(checkpoint, self.accelerator, self.model, self.optimizer)
        return names(folder)


def test_a_full_disk_leaves_the_checkpoints_that_are_there(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever file it hits: torch and safetensors say it in their own words, the user reads one sentence."""
    run_, step = Run(), 0
    hit: set[str] = set()
    first = run_.save(small_disk, 0)
    size = sum(f.stat().st_size for f in first.rglob("*") if f.is_file())
    pad = small_disk / "somebody-else"
    for left in range(4096, size + 4096, size // 10):
        step += 1
        free = shutil.disk_usage(small_disk).free
        pad.write_bytes(b"x" * max(free - left, 0))

        def command(_: Any, step: int = step) -> None:
            run_.save(small_disk, step)

        code = main_guard(command)
        said = capsys.readouterr().err
        pad.unlink()
        if code == 0:
            continue
        hit.update(p.name for p in (small_disk / "checkpoints").glob(".*/**/*") if p.is_file())
        assert code == 2 and said.startswith("error: No space left on device while writing"), said
        assert "free space and run the same command again" in said
        assert f"step-{step:06d}" not in run_.whole(small_disk)
        shutil.rmtree(small_disk / "checkpoints" / f".step-{step:06d}.tmp")
    assert {"model.safetensors", "state.pt"} <= hit
    run_.save(small_disk, 1000)
    assert run_.whole(small_disk)[-1] == "step-001000"


@pytest.mark.parametrize("call", range(5))
def test_a_disk_that_fails_leaves_the_old_checkpoint_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: int
) -> None:
    run_, count = Run(), 0
    run_.save(tmp_path, 1)
    real = os.fsync

    def failing(handle: int) -> None:
        nonlocal count
        count += 1
        if count == call + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "the disk")
        real(handle)

    monkeypatch.setattr(train.checkpoint.os, "fsync", failing)
    assert main_guard(lambda _: bool(run_.save(tmp_path, 2))) == 2
    monkeypatch.undo()
    said = capsys.readouterr().err
    assert "Input/output error at " in said and "; the disk failed" in said
    assert run_.whole(tmp_path) == ["step-000001"]
    run_.save(tmp_path, 2)
    assert run_.whole(tmp_path) == ["step-000001", "step-000002"]
    assert not list(tmp_path.glob("checkpoints/.*.tmp"))


def test_the_clock_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints go by their steps; a report drawn after the clock was set back is newer than its results."""
    for age, folder in enumerate(fake(tmp_path, 10, 20, 30)):
        stamp = time.time() + 1e6 * (2 - age)  # the oldest step has the newest time
        for path in (folder, folder / "DONE"):
            os.utime(path, (stamp, stamp))
    assert find_checkpoint(tmp_path, "latest").name == "step-000030"
    delete_old(tmp_path, keep=2)
    assert names(tmp_path) == ["step-000020", "step-000030"]

    real = eval.report.write_results

    def write_in_the_future(folder: Path, results: Any) -> Path:
        path = real(folder, results)
        os.utime(path, (time.time() + 1e6,) * 2)
        return path

    monkeypatch.setattr(eval.report, "write_results", write_in_the_future)
    write_report(tmp_path / "evals", RESULTS, [])
    assert reported(tmp_path / "evals")


@pytest.mark.slow
def test_a_second_training_run_in_the_same_folder_is_refused(
    extracted: Path, tmp_path: Path
) -> None:
    config = copy_run(extracted, tmp_path, max_steps=2)
    run_dir = Path(load_config(config).run_dir)
    with FolderLock(run_dir, "train"):
        out = run("train/main.py", "--config", str(config), status=2)
    assert "another train process (pid" in out and "wait for it to end" in out
    assert not (run_dir / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_ends_the_run_and_is_named(
    extracted: Path, tmp_path: Path
) -> None:
    """As the kernel does to a process when memory runs out. What was saved before is whole."""
    config = copy_run(
        extracted, tmp_path, max_steps=5000, epochs=5000, max_length=48, batch_size=1, checkpoint_every=2
    )  # fmt: skip
    run_dir = Path(load_config(config).run_dir)
    with (tmp_path / "out").open("w+") as out:
        process = subprocess.Popen(command(config, 2), cwd=ROOT, stdout=out, stderr=out)
        while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < 3:
            assert process.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.05)
        (second,) = (pid for pid in family(process.pid) if rank_of(pid) == "1")
        os.kill(second, signal.SIGKILL)
        assert process.wait(timeout=120) != 0
    said = (tmp_path / "out").read_text()
    assert f"Signal 9 (SIGKILL) received by PID {second}" in said
    for checkpoint in complete_checkpoints(run_dir):
        require_intact(checkpoint)
