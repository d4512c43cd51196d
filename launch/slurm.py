"""A run through Slurm: three jobs in a row, each a readable script in RUN/slurm/ that goes on where it stopped.

    python launch/main.py submit --config configs/qwen3-8b.yaml --accelerate-config configs/accelerate/gpu8-zero1.yaml

extract.sh is one job of a process a GPU, train.sh one launcher a node, eval.sh a watcher; submit.sh queues them and can
be run again by hand. Preemption and the end of a job's time put it back into the queue with all work saved.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.load import UserError
from configs.provenance import atomic_write_text, open_run_dir
from configs.schema import Config
from launch.pipeline import common_arguments, script, wanted_stages

GRACE_SECONDS = 120  # between SIGTERM and the end of a job's time, to write a checkpoint

RUN = """\
again=0
trap 'again=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM  # to the processes of srun; srun itself would kill them
stage() {  # in the background, because the shell hears no signal while a command runs in the foreground
    "$@" &
    child=$!
    wait "$child"; status=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done  # a signal ends `wait` before the command
    [ "$status" = 0 ] && return
    if [ "$again" = 1 ] || [ "$status" = 143 ]; then  # 143: ended by SIGTERM itself
        echo "stopped by SIGTERM with status $status; back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$status"
}
"""

EXTRACT_NOTE = """\
# One job and not an array: its processes wait for each other's answers before the next turn of a chat, so that all of
# them must run at the same time. Each works on shards of its own; a finished shard is never made again.
"""
TRAIN_NOTE = """\
# One launcher a node; all meet at the first node. A node that does not come ends the job after 10 minutes.
export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PORT=$((20000 + SLURM_JOB_ID % 20000))
# How long a launcher waits for its processes after SIGTERM, in seconds; it would be 30.
export PET_SHUTDOWN_TIMEOUT=100
"""
EVAL_NOTE = "# Training is over; the watcher evaluates what has no results yet and ends.\n"


def submit(config: Config, args: argparse.Namespace) -> int:
    """Write the scripts and queue them; with --dry-run print them. UserError where there is no Slurm."""
    scripts = slurm_scripts(config, args)
    if args.dry_run:
        for name, text in scripts.items():
            print(f"# ----- {name}\n{text}")
        return 0
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on this machine's PATH; submit on a login node of the cluster, or add --dry-run to "
            "see the scripts"
        )
    folder = open_run_dir(config, stage="submit", resume=False).absolute() / "slurm"
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        atomic_write_text(folder / name, text)
    print(f"scripts and output: {folder}", flush=True)
    return subprocess.run(["bash", str(folder / "submit.sh")], check=False).returncode


def slurm_scripts(config: Config, args: argparse.Namespace) -> dict[str, str]:
    """The text of every script, by file name. UserError for what a queue cannot do."""
    stages = wanted_stages(args)
    if "extract" in stages and config.extract.backend == "vllm":
        raise UserError(
            "extract.backend is vllm and a queued job knows no server; extract as docs/backends.md says, then submit "
            "with --from train"
        )
    scripts = {}
    if "extract" in stages:
        scripts["extract.sh"] = extract_script(config, args)
    if "train" in stages:
        scripts["train.sh"] = train_script(config, args)
    if config.eval.prompts and {"replay", "live"} & set(stages):
        scripts["eval.sh"] = eval_script(config, args, stages)
    scripts["submit.sh"] = submit_script(config, list(scripts))
    return scripts


def extract_script(config: Config, args: argparse.Namespace) -> str:
    options = config.launch.slurm
    # A target that is spread over a node's GPUs is one process.
    each = 1 if config.target.device == "balanced" else max(1, options.gpus_per_node)
    command = shlex.join([sys.executable, script("extract"), *common_arguments(args)])
    ranks = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
    head = header(config, "extract", options.nodes, each, options.cpus_per_task)
    return head + EXTRACT_NOTE + srun(f"{ranks} exec {command}", options.cpus_per_task)


def train_script(config: Config, args: argparse.Namespace) -> str:
    options = config.launch.slurm
    each = max(1, options.gpus_per_node)
    command = [script("train"), *common_arguments(args), "--resume"]
    launcher = [sys.executable]
    where = ""
    if args.accelerate_config or options.nodes * each > 1:
        launcher += ["-m", "accelerate.commands.launch", "--quiet"]
        if args.accelerate_config:
            launcher += ["--config_file", args.accelerate_config]
        else:
            launcher += ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
        launcher += ["--num_machines", str(options.nodes)]
        if options.gpus_per_node or not args.accelerate_config:
            launcher += ["--num_processes", str(options.nodes * each)]
        if options.nodes > 1:  # DeepSpeed's own way would be ssh from the first node to the others
            launcher += ["--deepspeed_multinode_launcher", "standard"]
        where = " --machine_rank $SLURM_NODEID --main_process_ip $HEAD --main_process_port $PORT"
    cores = options.cpus_per_task * each
    head = header(config, "train", options.nodes, 1, cores)
    return (
        head
        + TRAIN_NOTE
        + srun(f"exec {shlex.join(launcher)}{where} {shlex.join(command)}", cores, options.nodes)
    )


def eval_script(config: Config, args: argparse.Namespace, stages: Sequence[str]) -> str:
    common = common_arguments(args)
    cores = f"--ntasks=1 --cpus-per-task={config.launch.slurm.cpus_per_task}"
    lines = []
    if "replay" in stages:
        command = [sys.executable, script("launch"), "watch", *common, "--mode", "replay"]
        lines.append(f"stage srun {cores} {shlex.join(command)}\n")
    if "live" in stages:
        command = [sys.executable, script("eval"), *common, "--mode", "live"]
        lines.append(f"stage srun {cores} {shlex.join(command)}\n")
    head = header(config, "eval", 1, 1, config.launch.slurm.cpus_per_task, gpus=1)
    return head + EVAL_NOTE + "".join(lines)


def submit_script(config: Config, names: Sequence[str]) -> str:
    lines = [
        "#!/bin/bash",
        "# Queues this run. Each job can be queued alone as well (sbatch FILE) and does what is left.",
        "set -euo pipefail",
    ]
    before = None
    for name in names:
        stage = name.removesuffix(".sh")
        after = ""
        if before:
            # With a window the two wait for each other's shards and run at the same time.
            together = config.extract.window_gb is not None and stage == "train"
            kind = "after" if together else "afterok"
            after = f'--dependency={kind}:"${{{before}%%;*}}" --kill-on-invalid-dep=yes '
        lines.append(f"{stage}=$(sbatch --parsable {after}{shlex.quote(str(_path(config, name)))})")
        lines.append(f'echo "queued: {stage} as job ${stage}"')
        before = stage
    return "\n".join(lines) + "\n"


def header(
    config: Config, stage: str, nodes: int, tasks: int, cores: int, *, gpus: int | None = None
) -> str:
    """The options of a job, its environment, and the function that runs its commands.

    `tasks` and `gpus` a node, `cores` a task.
    """
    options = config.launch.slurm
    gpus = options.gpus_per_node if gpus is None else min(gpus, options.gpus_per_node)
    wanted = {
        "job-name": f"{Path(config.run_dir).name}-{stage}",
        "output": str(_path(config, f"{stage}-%j.out")),
        "open-mode": "append",
        "chdir": str(Path.cwd()),
        "nodes": str(nodes),
        "ntasks-per-node": str(tasks),
        "cpus-per-task": str(cores),
        "gpus-per-node": str(gpus) if gpus else None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "signal": f"B:TERM@{GRACE_SECONDS}",
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{key}={shlex.quote(v)}" for key, v in wanted.items() if v is not None]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {line}" for line in options.sbatch)]
    setup = "".join(f"{line}\n" for line in options.setup)
    return "\n".join(lines) + f"\n\n{setup}{RUN}\n"


def srun(command: str, cores: int, tasks: int | None = None) -> str:
    """Run a shell command once a task; when one of them fails the others end too."""
    how = "--kill-on-bad-exit=1" + f" --ntasks={tasks}" * (tasks is not None)
    return f"stage srun {how} --cpus-per-task={cores} bash -c {shlex.quote(command)}\n"


def _path(config: Config, name: str) -> Path:
    return Path(config.run_dir).absolute() / "slurm" / name
