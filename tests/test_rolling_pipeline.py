"""Extraction and training at once under a byte budget, as their user starts them, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from configs.load import load_config
from extract.window import WindowReader, released_in
from tests.conftest import QUESTIONS, write_config, write_prompts

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
WINDOW_GB = 0.0007  # of 0.0021 in all
pytestmark = pytest.mark.slow


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    out = process.communicate(timeout=300)[0]
    assert process.returncode == status, out
    assert "Traceback" not in out, out
    return out


class Watch(threading.Thread):
    """The most bytes that the shards of a folder took at any moment, finished or not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.peak, self.over = folder, 0, False
        self.start()

    def run(self) -> None:
        while not self.over:
            total = 0
            for file in [*self.folder.glob("*shard-*.safetensors*")]:
                try:
                    total += file.stat().st_size
                except FileNotFoundError:
                    continue
            self.peak = max(self.peak, total)
            time.sleep(0.005)


def rolling_config(folder: Path, target: Path) -> Path:
    folder.mkdir()
    questions = [f"{q} {i}" for i in range(6) for q in QUESTIONS]
    return write_config(
        folder / "config.yaml",
        target,
        data={"prompts": [str(write_prompts(folder / "many.jsonl", questions))], "max_new_tokens": 24},
        extract={"window_gb": WINDOW_GB},
        train={"epochs": 3, "checkpoint_every": 2, "keep_checkpoints": 2},
    )  # fmt: skip


def losses(run_dir: Path) -> dict[int, tuple[float, int]]:
    """(loss, tokens) of every step; of a step that was done twice the later one."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["tokens"]) for line in lines}


def weights(run_dir: Path) -> bytes:
    return (max((run_dir / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from start to end through the launcher, never over its budget."""
    config = rolling_config(tmp_path_factory.mktemp("rolling") / "whole", tiny_target)
    run_dir = Path(load_config(config).run_dir)
    watch = Watch(run_dir / "states")
    out = finish(start("launch/main.py", "run", "--config", str(config), "--until", "replay"))
    watch.over = True
    assert "DDTree" in out and "window:   0.0007 of 0.00" in out
    states = run_dir / "states"
    plan = WindowReader(states).plan
    assert plan.totals.bytes > 2.5e9 * WINDOW_GB, "a window that holds everything tests nothing"
    assert WINDOW_GB * 0.5e9 < watch.peak <= WINDOW_GB * 1e9
    assert not list(states.glob("*.safetensors.tmp")) and not list(
        states.glob("shard-*.safetensors")
    )
    assert released_in(states) == len(plan.shards)
    # every token three times
    assert sum(tokens for _, tokens in losses(run_dir).values()) == 3 * plan.totals.tokens
    return config


def test_what_is_gone_is_said_and_nothing_is_done_again(whole):
    config = str(whole)
    assert "shards were read and deleted" in finish(
        start("extract/main.py", "--config", config, "--verify")
    )
    assert "read by training and deleted" in finish(
        start("extract/main.py", "--config", config, "--describe")
    )
    before = weights(Path(load_config(whole).run_dir))
    out = finish(start("launch/main.py", "run", "--config", config, "--until", "train"))
    assert "training is complete" in out
    assert before == weights(Path(load_config(whole).run_dir))
    states = Path(load_config(whole).run_dir) / "states"
    assert not list(states.glob("shard-*.safetensors"))


def test_either_side_may_be_killed_at_any_moment(whole, tiny_target, tmp_path):
    config = rolling_config(tmp_path / "killed", tiny_target)
    run_dir = Path(load_config(config).run_dir)
    states, checkpoints = run_dir / "states", run_dir / "checkpoints"
    extract = ("extract/main.py", "--config", str(config))
    train = ("train/main.py", "--config", str(config))
    watch = Watch(states)
    total = len(losses(Path(load_config(whole).run_dir)))

    def when(happened) -> None:
        limit = time.monotonic() + 240
        while not happened():
            assert time.monotonic() < limit
            time.sleep(0.01)

    def steps() -> int:
        return max((int(p.name[5:]) for p in checkpoints.glob("step-*/")), default=0)

    extraction, training = start(*extract), start(*train)
    when(lambda: len(list(states.glob("shard-*.json"))) >= 2)
    extraction.kill()
    when(lambda: steps() >= 2 or len(list(states.glob("shard-*.safetensors"))) >= 2)
    extraction.wait()
    extraction = start(*extract)
    when(lambda: steps() >= total // 3)
    training.kill()
    training.wait()
    training = start(*train, "--resume")
    when(lambda: steps() >= total // 2)
    extraction.kill()
    training.send_signal(signal.SIGTERM)  # perhaps while it waits for a shard
    finish(training, status=128 + signal.SIGTERM)
    extraction.wait()
    extraction, training = start(*extract), start(*train, "--resume")
    finish(training)
    finish(extraction)
    watch.over = True

    assert watch.peak <= WINDOW_GB * 1e9
    assert losses(run_dir) == losses(Path(load_config(whole).run_dir))
    assert weights(run_dir) == weights(Path(load_config(whole).run_dir))


def test_two_processes_on_each_side_do_what_one_does(whole, tiny_target, tmp_path):
    config = rolling_config(tmp_path / "two", tiny_target)
    run_dir = Path(load_config(config).run_dir)
    launch = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml")
    half = ("--config", str(config), "--set", "train.batch_size=1")
    extraction = start(*launch, "--main_process_port", "29512", "extract/main.py", *half)
    finish(start(*launch, "--main_process_port", "29513", "train/main.py", *half))
    finish(extraction)
    one, two = losses(Path(load_config(whole).run_dir)), losses(run_dir)
    assert [tokens for _, tokens in one.values()] == [tokens for _, tokens in two.values()]
    assert [x for x, _ in two.values()] == pytest.approx([x for x, _ in one.values()], rel=1e-4)


def test_a_window_that_is_too_small_and_a_checkpoint_that_is_gone_are_refused(whole, tmp_path):
    config = load_config(whole)
    small = ["--set", f"run_dir={tmp_path / 'run'}", "--set", "extract.window_gb=0.00001"]
    out = finish(start("extract/main.py", "--config", str(whole), *small), status=2)
    assert "extract.window_gb=1e-05 is smaller than one shard" in out
    for folder in (Path(config.run_dir) / "checkpoints").glob("step-*"):
        folder.rename(tmp_path / folder.name)
    again = finish(start("train/main.py", "--config", str(whole)), status=2)
    assert "step 0 needs shard 0 and the first" in again and "window.json" in again
    for folder in tmp_path.glob("step-*"):
        folder.rename(Path(config.run_dir) / "checkpoints" / folder.name)
    tight = ["--set", "extract.window_gb=0.0002"]
    out = finish(start("train/main.py", "--config", str(whole), "--resume", *tight), status=2)
    assert "extract.window_gb=0.0002 is too small" in out
