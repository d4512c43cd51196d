"""Several machines: the same run as one process, under every launcher; what does not meet ends in one sentence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

import train.startup
from configs.load import UserError, load_config
from tests.conftest import write_config
from tests.slurm_cluster import free_port
from tests.test_pipeline import close, copy_run, gradients, run
from train.startup import make_accelerator

ROOT = Path(__file__).resolve().parent.parent
TRAIN = "train/main.py"


def forget_processes() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def rank0_of_2(monkeypatch, tmp_path):
    """The environment of the first of two processes, of which the second never comes."""
    monkeypatch.setattr(train.startup, "MEETING", timedelta(seconds=2))
    port = free_port()
    names = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    forget_processes()  # of other tests in this process
    yield port
    forget_processes()


def test_a_machine_that_does_not_come_is_named_within_the_stated_time(rank0_of_2, tmp_path):
    config = load_config(write_config(tmp_path / "config.yaml", tmp_path))
    with pytest.raises(
        UserError, match=f"process 0 of 2 did not meet the others at 127.0.0.1:{rank0_of_2}"
    ):
        make_accelerator(config)


def test_a_second_process_of_rank_0_is_refused(rank0_of_2, tmp_path):
    config = load_config(write_config(tmp_path / "config.yaml", tmp_path))
    with socket.socket() as first:
        first.bind(("127.0.0.1", rank0_of_2))
        first.listen()
        with pytest.raises(UserError, match="each with a rank of its own"):
            make_accelerator(config)


def together(*commands: list[str], **environment: str) -> None:
    """Run all at the same time, with an environment as its ranks; each must end well."""
    ranks = [{"RANK": str(i)} if environment else {} for i in range(len(commands))]
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment, **ranks[rank]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    outs = [process.communicate(timeout=900)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), outs
    assert any("2 processes = 4 rows" in out for out in outs), outs


@pytest.mark.slow
def test_two_machines_torchrun_and_plain_python_train_as_one_process_does(tiny_target, tmp_path):
    extracted = write_config(tmp_path / "config.yaml", tiny_target)
    run("extract/main.py", "--config", str(extracted))

    def copy(name: str, batch_size: int) -> Path:
        return copy_run(
            extracted, tmp_path / name, max_steps=3, epochs=9, max_length=48, batch_size=batch_size
        )

    whole = copy("one", 4)
    run(TRAIN, "--config", str(whole))

    machines = copy("machines", 2)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml",
                "--num_machines", "2", "--main_process_ip", "127.0.0.1",
                "--main_process_port", str(free_port())]  # fmt: skip
    train = [TRAIN, "--config", str(machines)]
    together(*([*launcher, "--machine_rank", str(rank), *train] for rank in (0, 1)))

    elastic = copy("torchrun", 2)
    nodes = ["--nproc_per_node", "2", "--master_port", str(free_port())]
    together(["-m", "torch.distributed.run", *nodes, TRAIN, "--config", str(elastic)])

    plain = copy("plain", 2)
    train = [TRAIN, "--config", str(plain)]
    meeting = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    together(train, train, **meeting, MASTER_PORT=str(free_port()))

    for config in (machines, elastic, plain):
        close(gradients(config), gradients(whole), 1e-4)
