"""Metrics: a JSON line a logged step, a line on the terminal, and wandb when it is wanted.

metrics.jsonl is the record of truth. wandb follows: it is started once, on the main process, on a step axis of its own
(`train/step`), and whatever it does wrong never stops the training.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from configs.provenance import atomic_write_json, atomic_write_text
from configs.schema import Config

START_SECONDS, FINISH_SECONDS = 15.0, 30.0  # a dead network holds a run up no longer than that


class Tracker:
    """`resume_step` drops the lines of metrics.jsonl past the checkpoint that training goes on from."""

    def __init__(
        self, run_dir: Path, config: Config, *, stage: str, resume_step: int | None
    ) -> None:
        self.file = run_dir / "metrics.jsonl"
        self.stage = stage
        if resume_step is not None and self.file.exists():
            kept = [line for line in _lines(self.file) if line["step"] <= resume_step]
            atomic_write_text(self.file, "".join(json.dumps(line) + "\n" for line in kept))
        self._out = self.file.open("a", encoding="utf-8")
        self._run: Any = start_wandb(run_dir, config, stage)

    def log(self, values: dict[str, Any]) -> None:
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()
        if self._run is not None and not log_wandb(
            self._run, {f"{self.stage}/{k}": v for k, v in flatten(values).items()}
        ):
            self._run = None

    def close(self) -> None:
        self._out.close()
        if self._run is not None:
            finish_wandb(self._run)


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Lists become numbered keys, so that wandb draws them: accuracy_at_position/1, ..."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list):
            out.update({f"{key}/{i + 1}": v for i, v in enumerate(value)})
        elif value is not None:
            out[key] = value
    return out


def _lines(file: Path) -> list[dict[str, Any]]:
    """Whole lines only: a killed process may leave half of one."""
    out = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            out.append(json.loads(line))
        except ValueError:
            continue
    return out


def start_wandb(run_dir: Path, config: Config, stage: str) -> Any:
    """A wandb run, or None when it is disabled or cannot start (said once on stderr).

    Online runs keep their id over a resume, so that a curve is one curve. Offline segments each get an id of their own
    in one group: syncing two segments with the same id erases the first (field bug E5).
    """
    mode = config.tracking.wandb
    if mode == "disabled":
        return None
    id_file = run_dir / f"wandb-{stage}.json"
    ids: list[str] = json.loads(id_file.read_text())["ids"] if id_file.exists() else []
    try:
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        name = config.tracking.name or run_dir.name
        new = mode == "offline" or not ids
        run_id = f"{stage}-{int(time.time() * 1000):x}-{os.getpid():x}" if new else ids[-1]
        run = wandb.init(
            project=config.tracking.project,
            entity=config.tracking.entity,
            name=f"{name}-{stage}",
            group=name,
            job_type=stage,
            id=run_id,
            resume=None if new else "allow",
            mode=mode,
            dir=str(run_dir),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(
                init_timeout=START_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
                x_disable_stats=True,
            ),
        )
        run.define_metric(f"{stage}/step")
        run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
    except Exception as error:  # no network, no key, no service: the run goes on with metrics.jsonl
        print(
            f"warning: wandb ({mode}) did not start: {error}; metrics.jsonl goes on",
            file=sys.stderr,
        )
        return None
    if run_id not in ids:
        atomic_write_json(id_file, {"ids": [*ids, run_id]})
    return run


def log_wandb(run: Any, values: dict[str, Any]) -> bool:
    """Whether wandb took them; what it raises is said on stderr and stops nobody."""
    try:
        run.log(values)
    except Exception as error:  # whatever its service does
        print(f"warning: wandb stopped ({error}); the files go on", file=sys.stderr)
        return False
    return True


def finish_wandb(run: Any) -> None:
    """Upload what is left, for FINISH_SECONDS at most."""
    try:
        run.finish()
    except Exception as error:  # also TimeoutError, when the network is away
        folder = Path(run.settings.sync_dir)
        print(
            f"warning: wandb has not got everything ({error}); `wandb sync {folder}` sends the rest",
            file=sys.stderr,
        )
