"""Slurm scripts: what they say, what they do with a signal, and a run through a real queue."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from configs.load import UserError, load_config
from launch.main import main, parser
from launch.slurm import RUN, slurm_scripts
from tests.conftest import write_config


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
