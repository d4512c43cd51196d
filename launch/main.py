"""Turn one YAML into a finished run, wherever the machines are.

    python launch/main.py run --config configs/smollm2-demo.yaml      extract, train, evaluate, on this machine
    python launch/main.py watch --config configs/smollm2-demo.yaml    evaluate checkpoints as they appear
    python launch/main.py submit --config configs/qwen3-8b.yaml       the same through Slurm

Every stage is a command of its own that goes on where it stopped, so doing this again after any interruption does what
is left. No stage's code runs in here; the run folder is the interface.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from configs.load import add_arguments, config_from_args, main_guard
from launch.pipeline import STAGES, common_arguments, run_stages, script
from launch.slurm import submit
from launch.watch import Watcher, environment_for, exit_on_sigterm

EXAMPLE = "example: python launch/main.py "
VERBS = (
    (
        "run",
        "extract, train and evaluate on this machine",
        "run --config configs/qwen3-8b.yaml --accelerate-config configs/accelerate/gpu8-zero1.yaml",
    ),
    (
        "watch",
        "evaluate checkpoints as they appear, newest first",
        "watch --config configs/qwen3-8b.yaml --gpu 7",
    ),
    (
        "submit",
        "extract, train and evaluate through Slurm",
        "submit --config configs/qwen3-8b.yaml --accelerate-config configs/accelerate/gpu8-zero1.yaml --dry-run",
    ),
)


def main(argv: Sequence[str] | None = None) -> int | None:
    args = parser().parse_args(argv)
    config = config_from_args(args)
    if args.verb == "run":
        return run_stages(config, args)
    if args.verb == "submit":
        return submit(config, args)
    evaluate = [sys.executable, script("eval"), *common_arguments(args)]
    command = [*evaluate, "--mode", args.mode, "--checkpoint"]
    exit_on_sigterm()
    watcher = Watcher(config, args.mode, command, environment_for(args.gpu, args.cpus))
    return watcher.watch(once=args.once)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="launch/main.py",
        description="Turn one YAML into a finished run.",
        epilog="example: python launch/main.py run --config configs/smollm2-demo.yaml",
    )
    verbs = out.add_subparsers(dest="verb", required=True)
    run, watch, submit = (
        verbs.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EXAMPLE + example
        )
        for name, text, example in VERBS
    )
    for verb in (run, watch, submit):
        add_arguments(verb)
    for verb in (run, submit):
        verb.add_argument(
            "--accelerate-config", metavar="FILE", help="how train is launched; unset: plainly"
        )
        verb.add_argument("--dry-run", action="store_true", help="print what would be done")
        for option, dest, stage, text in (
            ("--from", "first", STAGES[0], "the first stage"),
            ("--until", "last", STAGES[-1], "the last stage"),
        ):
            verb.add_argument(
                option, dest=dest, choices=STAGES, default=stage, help=f"{text}; unset: {stage}"
            )
    watch.add_argument("--mode", choices=("replay", "live"), default="replay", help="unset: replay")
    watch.add_argument(
        "--once", action="store_true", help="evaluate what is there and do not wait for more"
    )
    device = watch.add_mutually_exclusive_group()
    device.add_argument("--gpu", type=int, metavar="N", help="evaluate on this GPU alone")
    device.add_argument("--cpus", metavar="0-3", help="evaluate on these cores alone")
    return out


if __name__ == "__main__":
    sys.exit(main_guard(main))
