"""`launch run`: whatever ends it and whenever, the same command ends with the same results."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from eval.results import read_results
from launch.main import parser
from launch.pipeline import STAGES, Stage, run, stages, wanted_stages
from launch.view import View, status_line
from tests.conftest import write_config

ROOT = Path(__file__).resolve().parent.parent
TIMINGS = {"tokens_per_second", "speedup", "phase_seconds", "provenance", "path"}


def shell(name: str, text: str) -> Stage:
    return Stage(name, ["bash", "-c", text])


def view(tmp_path: Path) -> View:
    return View(tmp_path, None, out=io.StringIO())


def test_stages_are_those_between_from_and_until_and_training_always_resumes(tmp_path):
    file = write_config(tmp_path / "config.yaml", tmp_path)
    args = parser().parse_args(
        ["run", "--config", str(file), "--set", "seed=1", "--from", "train", "--until", "replay"]
    )
    assert wanted_stages(args) == ("train", "replay")
    found = {s.name: s.command for s in stages(load_config(file), args)}
    assert tuple(found) == STAGES
    for command in found.values():
        assert command[2:6] == ["--config", str(file), "--set", "seed=1"]
    assert found["train"][-1] == "--resume"


def test_when_one_stage_fails_the_other_is_asked_to_stop(tmp_path):
    waits = shell("train", "trap 'echo saved; exit 143' TERM; while :; do sleep 0.05; done")
    what = view(tmp_path)
    assert run([shell("extract", "sleep 0.3; echo no room; exit 2"), waits], what) == ("extract", 2)
    assert list(what.tails["extract"]) == ["no room"]
    assert list(what.tails["train"])[-1] == "saved"
    # status 1 of extract leaves out samples and is no reason to stop
    waits = shell("train", "sleep 0.6; echo trained")
    assert run([shell("extract", "exit 1"), waits], what) == ("extract", 1)
    assert list(what.tails["train"]) == ["trained"]


def test_output_is_shown_as_it_comes_and_a_progress_bar_by_its_end(tmp_path):
    what = view(tmp_path)
    assert run(
        [shell("extract", r"printf '10%%\r100%%\nerr\n' >&2; printf 'no newline'")], what
    ) == ("", 0)
    assert what.last_words("extract") == ["100%", "err", "no newline"]
    banner = "; ".join(f"echo banner {i}" for i in range(20))
    assert run([shell("train", f"echo error: too small; {banner}; exit 1")], what) == ("train", 1)
    assert what.last_words("train") == ["error: too small"]


def test_the_status_line_says_what_the_run_folder_says(tmp_path):
    assert (
        status_line(tmp_path, ["extract"], None)
        == "extract | 0 batches of answers, 0 shards of states"
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "loss": 2.5}\n{"step": 5, "lo')
    assert status_line(tmp_path, ["train"], 9) == "train | step 4/9 | loss 2.500"
    rows = [
        {"dataset": "math", "decoder": d, "tau": t} for d, t in (("dflash", 1.5), ("ddtree", 2))
    ]
    for step, tau in ((2, 1.25), (10, 1.5)):
        rows[0]["tau"] = tau
        (tmp_path / f"evals/step-{step:06d}").mkdir(parents=True)
        (tmp_path / f"evals/step-{step:06d}/results.json").write_text(json.dumps({"rows": rows}))
    assert status_line(tmp_path, ["live"], 9).endswith("| tau math 1.50 (step-000010)")


def start(config: Path, run_dir: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "launch/main.py", "run", "--config", str(config), "--set", f"run_dir={run_dir}", *more],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip


def results_of(run_dir: Path) -> dict[str, Any]:
    """Every results.json below a run folder, timings and addresses aside."""

    def facts(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: facts(v) for k, v in value.items() if k not in TIMINGS}
        return [facts(v) for v in value] if isinstance(value, list) else value

    files = sorted(run_dir.glob("evals/**/results.json"))
    return {str(f.relative_to(run_dir)): facts(read_results(f)) for f in files}


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_results_of_an_uninterrupted_one(
    tiny_target, tmp_path
):
    """PACELINE_KILLS=10 is what `launch run` promises; fewer here, for time."""
    config = write_config(
        tmp_path / "config.yaml",
        tiny_target,
        train={"max_steps": 6, "epochs": 9, "checkpoint_every": 2, "max_length": 48},
    )
    began = time.monotonic()
    out = start(config, tmp_path / "whole").communicate(timeout=900)[0]
    span = time.monotonic() - began
    assert "=== done: extract" in out and "tau" in out, out
    wanted = results_of(tmp_path / "whole")
    assert len(wanted) == 4  # replay of three checkpoints, live of one

    seed = int(os.environ.get("PACELINE_SEED", random.SystemRandom().randrange(10**6)))
    moments = random.Random(seed)
    for _ in range(int(os.environ.get("PACELINE_KILLS", "2"))):
        process = start(config, tmp_path / "parts")
        try:
            process.communicate(timeout=moments.uniform(0.1, 0.9) * span)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    out = start(config, tmp_path / "parts").communicate(timeout=900)[0]
    assert "Traceback" not in out, (seed, out)
    assert results_of(tmp_path / "parts") == wanted, (seed, out)

    # a second run has nothing to do, and the evaluations are not even started
    again = start(config, tmp_path / "parts", "--from", "replay").communicate(timeout=900)[0]
    assert again.count("its results are there") == 2 and "nothing was left to do" in again
    shutil.rmtree(tmp_path / "parts" / "states")
    failed = start(config, tmp_path / "parts", "--from", "train", "--until", "train")
    out = failed.communicate(timeout=900)[0]
    assert failed.returncode == 2 and "train | error: there is no states folder" in out
    assert f"to continue: python launch/main.py run --config {config}" in out
