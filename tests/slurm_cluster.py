"""A Slurm of one node for a test: the real daemons, with keys, ports, state and logs of their own in a folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import apt_install

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")


def require_slurm() -> None:
    """Install what is missing, or skip where that cannot be done."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons want root")
    os.environ["PATH"] += ":/usr/sbin"  # where Debian has the daemons, and not every shell looks
    if not all(map(shutil.which, PROGRAMS)):
        apt_install(*PACKAGES)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def cluster(folder: Path, cpus: int) -> Iterator[dict[str, str]]:
    """Start it; yields the environment in which sbatch and its kin talk to it. Stopped by its pid files."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    key, munge = folder / "munge" / "key", folder / "munge" / "socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    conf = folder / "slurm.conf"
    # A requeued job waits until its old credential has expired, hence cred_expire.
    conf.write_text(f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,sched_min_interval=0
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
""")
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    for name in [
        n for n in environment if n.startswith(("SLURM_", "SBATCH_")) and n != "SLURM_CONF"
    ]:
        del environment[name]
    files = [f"--{what}-file={folder}/munge/{what}" for what in ("pid", "log", "seed")]
    daemons = [
        ["munged", "--force", f"--key-file={key}", f"--socket={munge}", *files],
        ["slurmctld", "-c", "-f", str(conf)],
        ["slurmd", "-c", "-N", host, "-f", str(conf)],
    ]
    pids = [folder / "slurmd.pid", folder / "slurmctld.pid", folder / "munge" / "pid"]
    try:
        for command in daemons:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + 60
        while "idle" not in (state := ask(environment, "sinfo", "-h", "-o", "%T")):
            assert time.monotonic() < deadline, (state, (folder / "slurmctld.log").read_text())
            time.sleep(0.2)
        yield environment
    finally:
        ask(environment, "scancel", "--user=root")
        for file in pids:
            if file.exists():
                stop(int(file.read_text()))


def stop(pid: int) -> None:
    """End a daemon and wait until it is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for _ in range(100):
            try:
                os.kill(pid, number if _ == 0 else 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def ask(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip()
