"""Slurm scripts: what they say, what they do with a signal, and a run through a real queue."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import UserError, load_config
from launch.main import main, parser
from launch.slurm import RUN, slurm_scripts
from tests.conftest import QUESTIONS, write_config, write_prompts
from tests.slurm_cluster import cluster, require_slurm

ROOT = Path(__file__).resolve().parent.parent


def scripts(config: Path, *more: str) -> dict[str, str]:
    args = parser().parse_args(["submit", "--config", str(config), *more])
    return slurm_scripts(load_config(config, args.overrides), args)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "two words"
    folder.mkdir()
    return write_config(folder / "config.yaml", tmp_path)


def test_scripts_are_shell_and_name_what_the_config_asks(config):
    sets = ["launch.slurm.partition=gpu", "launch.slurm.nodes=2", "launch.slurm.time=1-00:00:00",
            "launch.slurm.sbatch=['--constraint=h100']", "launch.slurm.setup=['module load cuda']"]  # fmt: skip
    found = scripts(config, *(part for text in sets for part in ("--set", text)))
    assert list(found) == ["extract.sh", "train.sh", "eval.sh", "submit.sh"]
    for name, text in found.items():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        if name != "submit.sh":
            for line in ("--partition=gpu", "--time=1-00:00:00", "--constraint=h100", "--requeue"):
                assert f"\n#SBATCH {line}\n" in text
            assert text.index("#SBATCH") < text.index("module load cuda") < text.index("stage ")
    assert "--ntasks-per-node=8\n" in found["extract.sh"]
    assert (
        "--ntasks-per-node=1\n" in found["train.sh"] and "--cpus-per-task=64" in found["train.sh"]
    )
    assert "--num_machines 2 --num_processes 16" in found["train.sh"]
    assert "--nodes=1\n" in found["eval.sh"] and "--gpus-per-node=1\n" in found["eval.sh"]
    assert found["submit.sh"].count("--dependency=afterok:") == 2


def test_a_balanced_target_is_one_process_a_node_and_a_window_starts_both_stages(config):
    assert (
        "--ntasks-per-node=1\n" in scripts(config, "--set", "target.device=balanced")["extract.sh"]
    )
    rolling = scripts(config, "--set", "extract.window_gb=5")["submit.sh"]
    assert '--dependency=after:"${extract%%;*}"' in rolling
    assert '--dependency=afterok:"${train%%;*}"' in rolling


def test_only_the_wanted_stages_are_queued(config):
    found = scripts(config, "--from", "train", "--until", "replay")
    assert list(found) == ["train.sh", "eval.sh", "submit.sh"]
    assert "--dependency" not in found["submit.sh"].split("train.sh")[0]
    assert "--mode live" not in found["eval.sh"]
    with pytest.raises(UserError, match="--from train"):
        scripts(config, "--set", "extract.backend=vllm")


def test_dry_run_leaves_nothing_and_without_slurm_it_says_so(config, monkeypatch, capsys):
    assert not main(["submit", "--config", str(config), "--dry-run"])
    assert "#SBATCH" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="no sbatch"):
        main(["submit", "--config", str(config)])
    assert not (config.parent / "run").exists()


@pytest.mark.parametrize(
    ("command", "send", "status", "requeued"),
    [
        ("true", False, 0, False),
        ("exit 3", False, 3, False),
        ("exit 143", False, 143, True),
        ("trap 'exit 9' TERM; echo $$ > up; while :; do sleep 0.05; done", True, 9, True),
        ("trap 'exit 0' TERM; echo $$ > up; while :; do sleep 0.05; done", True, 0, False),
    ],
)  # fmt: skip
def test_a_stage_that_sigterm_stopped_goes_back_into_the_queue(
    tmp_path, command, send, status, requeued
):
    """Also when its launcher answers with a status of its own; not when it was done just in time."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" > requeued\n')
    (tmp_path / "scancel").write_text('#!/bin/sh\nkill -TERM "$(cat up)"\n')
    for name in ("scontrol", "scancel"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(f'{RUN}stage bash -c "$1"\n')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "job.sh", command], cwd=tmp_path, env=environment)
    if send:
        while not ((tmp_path / "up").exists() and (tmp_path / "up").read_text()):
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == status
    assert (tmp_path / "requeued").exists() == requeued
    assert not requeued or (tmp_path / "requeued").read_text() == "requeue 7\n"


@pytest.mark.slow
def test_a_run_goes_through_a_real_queue_and_is_sent_back_twice(tiny_target, tmp_path):
    """Extraction by two tasks and training by two processes, both stopped by SIGTERM on the way, then the evaluation."""
    require_slurm()
    config = write_config(
        tmp_path / "config.yaml",
        tiny_target,
        data={
            "prompts": [str(write_prompts(tmp_path / "many.jsonl", [f"{q} {i}" for i in range(8) for q in QUESTIONS]))],
            "max_new_tokens": 96,
        },
        train={"max_steps": 200, "epochs": 99, "checkpoint_every": 200, "max_length": 48, "batch_size": 1},
        launch={"slurm": {"gpus_per_node": 0, "cpus_per_task": 1, "time": "1:00:00", "sbatch": ["--ntasks-per-node=2"]}},
    )  # fmt: skip
    run_dir, submit = tmp_path / "run", [sys.executable, "launch/main.py", "submit"]
    launcher = ["--accelerate-config", "configs/accelerate/cpu2.yaml"]
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path is short
    with cluster(folder, cpus=2) as environment:
        environment |= {"OMP_NUM_THREADS": "1"}

        def say(*command: str) -> str:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
            )
            return done.stdout

        out = say(*submit, "--config", str(config), *launcher)
        jobs = dict(re.findall(r"queued: (\w+) as job (\d+)", out))
        assert list(jobs) == ["extract", "train", "eval"]

        def facts(stage: str) -> dict[str, str]:
            shown = say("scontrol", "show", "job", jobs[stage]).split()
            return dict(part.split("=", 1) for part in shown if "=" in part)

        def logs() -> str:
            return "\n".join(f.read_text() for f in sorted((run_dir / "slurm").glob("*.out")))

        def wait(done: Callable[[], bool], what: str) -> None:
            deadline = time.monotonic() + 1800  # minutes on an idle machine
            while not done():
                assert time.monotonic() < deadline, f"{what} never came\n{logs()}"
                time.sleep(0.1)

        wait(lambda: any(run_dir.glob("conversations/*.jsonl")), "an answer")
        say("scancel", "--batch", "--signal=TERM", jobs["extract"])
        wait(lambda: facts("extract")["Restarts"] == "1", "extraction's way back into the queue")
        metrics = run_dir / "metrics.jsonl"
        wait(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, "a step")
        say("scancel", "--batch", "--signal=TERM", jobs["train"])
        wait(lambda: facts("train")["Restarts"] == "1", "training's way back into the queue")
        wait(
            lambda: facts("eval")["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), "the end"
        )
        assert [facts(stage)["JobState"] for stage in jobs] == ["COMPLETED"] * 3, logs()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 201))
    checkpoints = sorted(p.name for p in (run_dir / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 2 and checkpoints[-1] == "step-000200"  # one at SIGTERM
    for name in (*checkpoints, "step-000200/live"):
        assert json.loads((run_dir / "evals" / name / "results.json").read_text())["rows"]
    shutil.rmtree(folder)
