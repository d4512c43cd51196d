"""Extract, train, evaluate: the stages of a run, as commands that each go on where they stopped."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.load import UserError
from configs.schema import Config
from eval.done import evaluated, reported, results_folder, settings_of
from extract.manifest import held_out_folders, read_manifest
from launch.summary import run_summary
from launch.view import View
from train.finished import complete_checkpoints

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("extract", "train", "replay", "live")


@dataclass(frozen=True)
class Stage:
    name: str
    command: list[str]


def common_arguments(args: argparse.Namespace) -> list[str]:
    """What every command of this run is given."""
    out = ["--config", args.config]
    for override in args.overrides:
        out += ["--set", override]
    return out


def script(room: str) -> str:
    return str(ROOT / room / "main.py")


def wanted_stages(args: argparse.Namespace) -> tuple[str, ...]:
    """The stages between --from and --until. UserError when there are none."""
    if STAGES.index(args.first) > STAGES.index(args.last):
        raise UserError(f"--from {args.first} comes after --until {args.last}")
    return STAGES[STAGES.index(args.first) : STAGES.index(args.last) + 1]


def stages(config: Config, args: argparse.Namespace) -> list[Stage]:
    """The commands of a run, in order, as a person would type them."""
    common = common_arguments(args)
    launcher = [sys.executable]  # one process needs no launcher
    if args.accelerate_config:
        launcher += [
            "-m",
            "accelerate.commands.launch",
            "--quiet",
            "--config_file",
            args.accelerate_config,
        ]
    evaluate = [sys.executable, script("eval"), *common]
    out = [
        Stage("extract", [sys.executable, script("extract"), *common]),
        # --resume is no mistake where there is nothing to go on from
        Stage("train", [*launcher, script("train"), *common, "--resume"]),
    ]
    if config.eval.prompts:
        out += [
            Stage("replay", [*evaluate, "--checkpoint", "all", "--mode", "replay"]),
            Stage("live", [*evaluate, "--checkpoint", "latest", "--mode", "live"]),
        ]
    return out


def run_stages(config: Config, args: argparse.Namespace) -> int:
    """Run what is left of a run. The exit status of the first stage that failed, 0 when all is done."""
    run_dir, wanted = Path(config.run_dir), wanted_stages(args)
    groups = [[stage] for stage in stages(config, args) if stage.name in wanted]
    if config.extract.window_gb is not None and wanted[:2] == STAGES[:2]:
        groups[:2] = [groups[0] + groups[1]]  # each waits for the other
    view = View(run_dir, config.train.max_steps)
    seconds: dict[str, float] = {}
    for group in groups:
        for stage in group:
            view.say(f"\n=== {stage.name}: {shlex.join(stage.command[1:])}")
        if args.dry_run:
            continue
        if all(has_results(config, stage.name) for stage in group):
            view.say("its results are there")
            continue
        started = time.monotonic()
        name, status = run(group, view)
        seconds[" and ".join(stage.name for stage in group)] = time.monotonic() - started
        if status != 0:
            for line in view.last_words(name):
                print(f"{name} | {line}", file=sys.stderr)
            again = shlex.join(["python", "launch/main.py", *sys.argv[1:]])
            killed = ", killed, as the kernel does when memory runs out" * (status in (-9, 137))
            print(
                f"\n{name} ended with status {status}{killed}; to continue: {again}",
                file=sys.stderr,
            )
            return status if status > 0 else 128 - status
    if not args.dry_run:
        spans = [f"{name} {span:.0f} s" for name, span in seconds.items()]
        print("\n=== done: " + (", ".join(spans) or "nothing was left to do"))
        if seconds:
            (run_dir / "seconds.json").write_text(json.dumps(seconds))
        print(run_summary(run_dir))
    return 0


def has_results(config: Config, stage: str) -> bool:
    """Whether an evaluation stage has nothing to do, told without its imports.

    Of the other stages only they themselves can tell: what is on the disk depends on prompts, weights and templates.
    """
    run_dir = Path(config.run_dir)
    checkpoints = complete_checkpoints(run_dir)
    if stage not in ("replay", "live") or not checkpoints:
        return False
    try:
        manifests = {n: read_manifest(f) for n, f in held_out_folders(config).items()}
        settings = settings_of(config, stage, manifests)
        for checkpoint in checkpoints if stage == "replay" else checkpoints[-1:]:
            results = results_folder(run_dir, checkpoint, stage)
            if not (evaluated(results, checkpoint, settings) and reported(results)):
                return False
    except UserError:
        return False  # the stage itself says what is wrong
    return True


def run(group: Sequence[Stage], view: View) -> tuple[str, int]:
    """Run stages at the same time until all have ended; (name, status) of the first that failed, or status 0.

    When one fails the others are asked to save what they have and stop, as all are by SIGTERM. Ctrl-C reaches all of them
    (same process group).
    """

    running: dict[str, subprocess.Popen[bytes]] = {}

    def stopping() -> None:
        view.say(f"\nstopping {' and '.join(running)}; what is there is saved")

    terminated: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: terminated.append(number))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    readers, failed = [], ("", 0)
    try:
        for stage in group:
            process = subprocess.Popen(
                stage.command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            assert process.stdout is not None
            running[stage.name] = process
            readers.append(view.follow(stage.name, process.stdout))
        while running:
            try:
                view.names = list(running)
                view.tick()
                time.sleep(0.25)
            except KeyboardInterrupt:
                stopping()
            if terminated:
                stopping()
                terminated.clear()
                for process in running.values():
                    process.send_signal(signal.SIGTERM)
            for name, process in list(running.items()):
                if (status := process.poll()) is None:
                    continue
                del running[name]
                if status != 0 and failed[1] == 0:
                    failed = name, status
                    # Status 1 of extract: all is written but what it names. Training can finish with the rest.
                    for other in running.values() if (name, status) != ("extract", 1) else ():
                        other.send_signal(signal.SIGTERM)
        for reader in readers:
            reader.join(
                timeout=5
            )  # longer only where a stage left a child behind that holds the pipe
    finally:
        signal.signal(signal.SIGTERM, before)
        view.close()
    return failed
