"""Evaluate every checkpoint of a run as it appears, the newest first.

    python launch/main.py watch --config configs/smollm2-demo.yaml
    python launch/main.py watch --config configs/smollm2-demo.yaml --mode live --gpu 7

Training writes checkpoints and knows nothing of their evaluation; this looks for those that are finished (DONE) and have
no results of the current settings, and runs eval/main.py on them, one at a time. Several watchers share the work: a
checkpoint is claimed by a lock that the kernel frees however its owner ends. It ends by itself when training is complete
and all is evaluated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from configs.load import UserError
from configs.provenance import FolderLock, LockHeldError, lock_owner
from configs.schema import Config
from eval.done import evaluated, lock_name, reported, results_folder, settings_of
from extract.manifest import held_out_folders, is_complete, read_manifest
from extract.waiting import Notice
from train.finished import DONE, complete_checkpoints, require_intact, step_of

POLL_SECONDS = 1.0
TRIES = 2  # a process that was started by hand may have taken the checkpoint in the meantime


class Watcher:
    """`command` evaluates one checkpoint when its folder is appended."""

    def __init__(
        self, config: Config, mode: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """UserError when the config names no held-out set."""
        if not config.eval.prompts:
            raise UserError("eval.prompts names no held-out set to evaluate; add at least one")
        self.config, self.mode, self.command = config, mode, command
        self.environment = environment
        self.run_dir = Path(config.run_dir)
        self._settings: str | None = None
        self._evaluated: set[tuple[str, int]] = set()
        self._failures: Counter[str] = Counter()
        self._notice = Notice(at_once=True)

    def watch(self, *, once: bool = False) -> int:
        """Return when training is complete and all is evaluated; with `once` when nothing is left at the moment.

        The exit status: 1 when an evaluation failed or found something that is not lossless.
        """
        print(f"watching {self.run_dir} for checkpoints without {self.mode} results", flush=True)
        status = 0
        while True:
            due = self.due()
            claimed = False
            for checkpoint in due:
                if (result := self._claim(checkpoint, len(due) - 1)) is not None:
                    status, claimed = max(status, result), True
                    break  # something newer may be there
            if claimed:
                continue
            if once or (not due and training_is_complete(self.run_dir)):
                failed = [name for name, count in self._failures.items() if count >= TRIES]
                print(self._verdict(due, failed), flush=True)
                return 1 if failed else status
            self._say_what_for(due)
            time.sleep(POLL_SECONDS)

    def due(self) -> list[Path]:
        """Finished checkpoints without results of the current settings, newest first."""
        found = [c for c in complete_checkpoints(self.run_dir) if self._failures[c.name] < TRIES]
        if found and self._settings is None:
            self._settings = self._settings_now()
        if self._settings is None:
            return []
        out = []
        for checkpoint in reversed(found):
            try:
                # A run that was deleted and trained again has other checkpoints of the same names.
                key = checkpoint.name, (checkpoint / DONE).stat().st_mtime_ns
                results = results_folder(self.run_dir, checkpoint, self.mode)
                if key in self._evaluated:
                    continue
                if evaluated(results, checkpoint, self._settings) and reported(results):
                    self._evaluated.add(key)
                else:
                    out.append(checkpoint)
            except FileNotFoundError:
                continue  # training keeps its latest ones only
        return out

    def _settings_now(self) -> str | None:
        """None while extraction is still at work on the held-out sets."""
        folders = held_out_folders(self.config)
        if not all(map(is_complete, folders.values())):
            return None
        manifests = {name: read_manifest(folder) for name, folder in folders.items()}
        return settings_of(self.config, self.mode, manifests)

    def _claim(self, checkpoint: Path, others: int) -> int | None:
        """Evaluate it and return the exit status, or None when another process is at it."""
        name = lock_name(checkpoint, self.mode)
        if lock_owner(self.run_dir, name):  # somebody without a watcher
            return None
        try:
            with FolderLock(self.run_dir, f"watch-{name}"):
                if checkpoint not in self.due():  # another watcher has just finished it
                    return None
                print(f"evaluating {checkpoint.name}; {others} more wait", flush=True)
                status = self._run([*self.command, str(checkpoint)])
        except LockHeldError:
            return None
        if not (checkpoint / DONE).exists():
            print(f"{checkpoint.name} is gone: training keeps its latest ones only", flush=True)
            return 0
        if checkpoint in self.due():
            self._failures[checkpoint.name] += 1
            print(f"the evaluation of {checkpoint.name} ended with status {status}", flush=True)
            return 0
        return status

    def _run(self, command: Sequence[str]) -> int:
        """The evaluation ends with its watcher, unless the watcher is killed outright."""
        process = subprocess.Popen(command, env=dict(self.environment))
        try:
            return process.wait()
        finally:
            process.terminate()
            process.wait()

    def _say_what_for(self, due: Sequence[Path]) -> None:
        checkpoints = complete_checkpoints(self.run_dir)
        if due:
            what = f"{', '.join(c.name for c in due)}, which other processes are evaluating"
        elif checkpoints and self._settings is None:
            what = f"extract/main.py to finish {self.run_dir / 'eval-sets'}"
        elif checkpoints and total_steps(checkpoints[-1]) is None:
            what = "more checkpoints; the ones here do not say when training ends, so Ctrl-C does"
        else:
            what = "the next checkpoint"
        self._notice.say(f"waiting for {what}")

    def _verdict(self, due: Sequence[Path], failed: Sequence[str]) -> str:
        if failed:
            return f"not evaluated, see above: {', '.join(failed)}"
        if due:
            return f"left to other processes: {', '.join(c.name for c in due)}"
        count = len(complete_checkpoints(self.run_dir))
        return f"all {count} checkpoints have {self.mode} results"


def total_steps(checkpoint: Path) -> int | None:
    """The steps of the whole training run, as its checkpoints say; None for one that does not."""
    try:
        require_intact(checkpoint, "resume/trainer.json")
        trainer: dict[str, Any] = json.loads((checkpoint / "resume" / "trainer.json").read_text())
    except (FileNotFoundError, ValueError):  # pruned, or damaged
        return None
    return trainer.get("total_steps")


def training_is_complete(run_dir: Path) -> bool:
    checkpoints = complete_checkpoints(run_dir)
    return any(total_steps(c) == step_of(c) for c in checkpoints[-1:])


def environment_for(gpu: int | None, cpus: str | None) -> dict[str, str]:
    """The environment of an evaluation that keeps to one GPU, or to some cores.

    This process is bound to the cores, and what it starts with it. UserError for cores that are not there.
    """
    environment = dict(os.environ)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    if cpus is not None:
        wanted = cpu_set(cpus)
        if missing := wanted - os.sched_getaffinity(0):
            raise UserError(
                f"--cpus {cpus} names cores {sorted(missing)}, and this process may use "
                f"{sorted(os.sched_getaffinity(0))}"
            )
        os.sched_setaffinity(0, wanted)
        environment |= {"OMP_NUM_THREADS": str(len(wanted)), "CUDA_VISIBLE_DEVICES": ""}
    return environment


def cpu_set(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}. UserError for anything else."""
    out: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            out |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise UserError(f"--cpus {text} is not a list of cores; write it as 0-3 or 0,2,4") from None
    return out


def exit_on_sigterm() -> None:
    """SIGTERM unwinds the stack, so that what was started is ended too."""

    def leave(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
