"""Turn one YAML into a finished run: extract, train, evaluate, one after the other (with a window the first two at once).

    python launch/main.py run --config configs/smollm2-demo.yaml

Every stage is a command of its own that goes on where it stopped, so running this again after any interruption does what
is left. Nothing is imported from the stages; the run folder is the interface.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.load import UserError, add_arguments, config_from_args, main_guard
from configs.schema import Config
from launch.summary import run_summary

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("extract", "train", "replay", "live")


@dataclass(frozen=True)
class Stage:
    name: str
    command: list[str]


def stages(config: Config, args: argparse.Namespace) -> list[Stage]:
    """The commands of a run, in order, as a person would type them."""
    common = ["--config", args.config]
    for override in args.overrides:
        common += ["--set", override]
    launcher = [sys.executable]  # one process needs no launcher
    if args.accelerate_config:
        launcher += [
            "-m",
            "accelerate.commands.launch",
            "--quiet",
            "--config_file",
            args.accelerate_config,
        ]
    resume = ["--resume"] if (Path(config.run_dir) / "checkpoints").exists() else []
    script = {name: str(ROOT / name / "main.py") for name in ("extract", "train", "eval")}
    evaluate = [sys.executable, script["eval"], *common]
    out = [
        Stage("extract", [sys.executable, script["extract"], *common]),
        Stage("train", [*launcher, script["train"], *common, *resume]),
    ]
    if config.eval.prompts:
        out += [
            Stage("replay", [*evaluate, "--checkpoint", "all", "--mode", "replay"]),
            Stage("live", [*evaluate, "--checkpoint", "latest", "--mode", "live"]),
        ]
    return out


def main(argv: Sequence[str] | None = None) -> int | None:
    parser = argparse.ArgumentParser(
        description="Run a whole experiment on this machine.",
        epilog="example: python launch/main.py run --config configs/smollm2-demo.yaml",
    )
    parser.add_argument("verb", choices=["run"])
    add_arguments(parser)
    parser.add_argument(
        "--accelerate-config", metavar="FILE", help="how train is launched; unset: one process"
    )
    parser.add_argument("--from", dest="first", choices=STAGES, default=STAGES[0])
    parser.add_argument("--until", dest="last", choices=STAGES, default=STAGES[-1])
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    args = parser.parse_args(argv)
    config = config_from_args(args)
    if STAGES.index(args.first) > STAGES.index(args.last):
        raise UserError(f"--from {args.first} comes after --until {args.last}")
    wanted = STAGES[STAGES.index(args.first) : STAGES.index(args.last) + 1]
    groups = [[stage] for stage in stages(config, args) if stage.name in wanted]
    if config.extract.window_gb is not None and wanted[:2] == STAGES[:2]:
        groups[:2] = [groups[0] + groups[1]]  # each waits for the other
    seconds: dict[str, float] = {}
    for group in groups:
        for stage in group:
            print(f"\n=== {stage.name}: {' '.join(stage.command[1:])}", flush=True)
        if args.dry_run:
            continue
        started = time.monotonic()
        name, status = run(group)
        seconds[" and ".join(stage.name for stage in group)] = time.monotonic() - started
        if status != 0:
            print(
                f"\n{name} ended with status {status}; the same command goes on from here",
                file=sys.stderr,
            )
            return status if status > 0 else 128 - status
    if not args.dry_run:
        print("\n=== done: " + ", ".join(f"{name} {span:.0f} s" for name, span in seconds.items()))
        (Path(config.run_dir) / "seconds.json").write_text(json.dumps(seconds))
        print(run_summary(Path(config.run_dir)))
    return None


def run(group: Sequence[Stage]) -> tuple[str, int]:
    """Run stages at the same time until all have ended; (name, status) of the first that failed, or status 0.

    When one fails the others are asked to save what they have and stop. Ctrl-C reaches all of them (same process group).
    """
    running = {stage.name: subprocess.Popen(stage.command) for stage in group}
    failed = ("", 0)
    while running:
        try:
            time.sleep(0.1)
        except KeyboardInterrupt:
            print(f"\nstopping {' and '.join(running)}; what is there is saved", file=sys.stderr)
        for name, process in list(running.items()):
            if (status := process.poll()) is None:
                continue
            del running[name]
            if status != 0 and failed[1] == 0:
                failed = name, status
                # Status 1 of extract: all is written but what it names. Training can finish with the rest.
                for other in running.values() if (name, status) != ("extract", 1) else ():
                    other.send_signal(signal.SIGTERM)
    return failed


if __name__ == "__main__":
    sys.exit(main_guard(main))
