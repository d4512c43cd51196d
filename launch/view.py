"""What the stages print, as they print it, and on a terminal a line below that says where the run is."""

from __future__ import annotations

import io
import json
import shutil
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

from launch.watch import total_steps
from train.finished import complete_checkpoints

TAIL, KEPT = 8, 60  # last lines of a stage: shown when it failed, and searched for its error
CLEAR = "\r\x1b[K"


class View:
    """Threads read the stages' output; `tick` draws the status line anew."""

    def __init__(self, run_dir: Path, max_steps: int | None, out: IO[str] | None = None) -> None:
        self.run_dir, self.max_steps = run_dir, max_steps
        self.out = out or sys.stdout
        self.live = self.out.isatty()
        self.started = time.monotonic()
        self.names: list[str] = []
        self.tails: dict[str, deque[str]] = {}
        self._lock = threading.Lock()

    def follow(self, name: str, pipe: IO[bytes]) -> threading.Thread:
        """Print what comes through a stage's pipe until the stage has closed it."""
        tail = self.tails[name] = deque(maxlen=KEPT)

        def read() -> None:
            # Only "\n" ends a line: a progress bar sends "\r", and its last state is all there is to show.
            for line in io.TextIOWrapper(pipe, errors="replace", newline="\n"):
                text = line.rstrip("\r\n").rpartition("\r")[2]
                tail.append(text)
                self.say(text)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def last_words(self, name: str) -> list[str]:
        """Why a stage failed: its own sentence, which a launcher may have buried under its banner, or its last lines."""
        tail = list(self.tails[name])
        errors = [line for line in tail if line.startswith("error: ")]
        return errors[-1:] or tail[-TAIL:]

    def say(self, text: str) -> None:
        with self._lock:
            self.out.write((CLEAR if self.live else "") + text + "\n")
            self.out.flush()

    def tick(self) -> None:
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            line = status_line(self.run_dir, self.names, self.max_steps)
            minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
            with self._lock:
                self.out.write(CLEAR + f"[{minutes}:{seconds:02d}] {line}"[:width])
                self.out.flush()

    def close(self) -> None:
        if self.live:
            self.out.write(CLEAR)
            self.out.flush()


def status_line(run_dir: Path, names: list[str], max_steps: int | None) -> str:
    """Stage, progress, last loss, last tau: as far as the run folder says."""
    parts = [" and ".join(names)]
    if "extract" in names:
        answers = len(list(run_dir.glob("**/conversations/*.jsonl")))
        shards = len(list(run_dir.glob("**/states/shard-*.json")))
        parts.append(f"{answers} batches of answers, {shards} shards of states")
    checkpoints = complete_checkpoints(run_dir)
    if line := _last_line(run_dir / "metrics.jsonl"):
        total = max_steps or (total_steps(checkpoints[-1]) if checkpoints else None)
        parts.append(f"step {line['step']}" + f"/{total}" * (total is not None))
        parts.append(f"loss {line['loss']:.3f}")
    if files := sorted(run_dir.glob("evals/step-*/results.json")):
        rows: list[dict[str, Any]] = json.loads(files[-1].read_text())["rows"]
        taus = [
            f"{r['dataset']} {r['tau']:.2f}"
            for r in rows
            if r["decoder"] == "dflash" and r["tau"] is not None
        ]
        parts.append(f"tau {', '.join(taus)} ({files[-1].parent.name})")
    return " | ".join(parts)


def _last_line(file: Path) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl; the one behind it may be half-written."""
    if not file.exists():
        return None
    with file.open("rb") as handle:
        handle.seek(max(0, file.stat().st_size - 8192))
        whole = handle.read().rpartition(b"\n")[0].splitlines()
    try:
        out: dict[str, Any] | None = json.loads(whole[-1]) if whole else None
    except ValueError:
        return None
    return out
