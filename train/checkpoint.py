"""Checkpoints: complete or absent.

    checkpoints/step-000200/
        model.safetensors  config.json  README.md      what engines load (the published layout)
        resume/            float32 weights, optimizer state, trainer.json
        DONE               comes last, with the sha256 of what is never written again; a folder without it does not
                           exist for anybody
    checkpoints/best.json  which one evaluation found the best; it is never deleted

Everything is written to `.step-000200.tmp` by all ranks, then renamed by one.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from safetensors import SafetensorError

from configs.load import UserError
from configs.provenance import FolderLock, atomic_write_json
from train.drafter import DFlashDrafter
from train.finished import (
    DONE,
    complete_checkpoints,
    is_unfinished,
    require_intact,
    seal,
)
from train.layout import save_drafter

BEST = "best.json"


def checkpoint_interval(wanted: int | None, total_steps: int) -> int:
    """Optimizer steps between checkpoints: train.checkpoint_every, or four times a run."""
    return wanted or max(1, math.ceil(total_steps / 4))


def find_checkpoint(run_dir: Path, name: str) -> Path:
    """`latest`, `best`, a step folder's name or a path -> a complete checkpoint. UserError otherwise."""
    done = complete_checkpoints(run_dir)
    if name == "latest":
        if not done:
            raise UserError(f"{run_dir} has no complete checkpoint; train first")
        return done[-1]
    if name == "best":
        record = read_best(run_dir)
        if record is None:
            raise UserError(
                f"nothing in {run_dir} says which checkpoint is the best; evaluate with --checkpoint all --mode replay"
            )
        if (best := run_dir / "checkpoints" / record["checkpoint"]) not in done:
            raise UserError(
                f"the best checkpoint was {best}, which is gone; evaluate with --checkpoint all --mode replay"
            )
        return best
    folder = Path(name) if Path(name).is_dir() else run_dir / "checkpoints" / name
    if not folder.is_dir():
        known = ", ".join(p.name for p in done) or "none"
        raise UserError(f"there is no checkpoint {name}; complete ones in {run_dir}: {known}")
    if is_unfinished(folder):
        raise UserError(
            f"checkpoint {folder} was never finished (it has no {DONE}); choose another"
        )
    return folder


def read_best(run_dir: Path) -> dict[str, Any] | None:
    """checkpoints/best.json: `checkpoint` (a folder's name), its `tau` and what that was measured `by`. UserError when
    it is damaged."""
    file = run_dir / "checkpoints" / BEST
    try:
        out: dict[str, Any] = json.loads(file.read_bytes())
        if {"checkpoint", "tau", "by"} == out.keys():
            return out
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError):
        pass
    raise UserError(
        f"{file} is damaged; delete it, and eval/main.py --checkpoint all writes it anew"
    )


def record_best(run_dir: Path, checkpoint: Path, tau: float, by: str) -> bool:
    """Name the best checkpoint, which training then keeps. False when training has deleted it already."""
    with FolderLock(run_dir, "best", wait=True):
        if not (checkpoint / DONE).exists():
            return False
        record = {"checkpoint": checkpoint.name, "tau": tau, "by": by}
        atomic_write_json(run_dir / "checkpoints" / BEST, record)
        return True


def delete_old(run_dir: Path, keep: int) -> None:
    """All complete checkpoints but the `keep` newest and the best."""
    with FolderLock(run_dir, "best", wait=True):  # none becomes the best in the meantime
        try:
            best = (read_best(run_dir) or {}).get("checkpoint")
        except UserError as error:  # it may be any of them
            print(f"warning: {error}; until then no checkpoint is deleted", file=sys.stderr)
            return
        for old in complete_checkpoints(run_dir)[:-keep]:
            if old.name != best:
                (old / DONE).unlink()  # first: a half-deleted folder is no checkpoint
                shutil.rmtree(old)


def save_checkpoint(
    run_dir: Path,
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    *,
    step: int,
    card: str,
    trainer: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of optimizer step `step` (all ranks call this). One that is there already is left alone."""
    final = run_dir / "checkpoints" / f"step-{step:06d}"
    if (final / DONE).exists():
        return final
    temporary = final.with_name(f".{final.name}.tmp")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)  # without DONE it is a leftover
        (temporary / "resume").mkdir(parents=True)
    accelerator.wait_for_everyone()
    with disk_errors(temporary):
        _write(temporary, accelerator, model, optimizer, step=step, card=card, trainer=trainer)
    if accelerator.is_main_process:
        temporary.rename(final)
        _flush(final.parent)
        delete_old(run_dir, keep)
    accelerator.wait_for_everyone()
    return final


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """A full or failing disk becomes an OSError with a name: torch and safetensors have errors of their own for it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(folder)) from error
    except (RuntimeError, SafetensorError) as error:
        said = str(error)
        if not any(
            word in said
            for word in ("No space left", "inline_container", "PytorchStream", "iostream")
        ):
            raise
        full = "No space left" in said or shutil.disk_usage(folder).free < 1 << 20
        code = errno.ENOSPC if full else errno.EIO
        raise OSError(code, os.strerror(code), str(folder)) from error


def _write(
    temporary: Path,
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    *,
    step: int,
    card: str,
    trainer: dict[str, Any],
) -> None:
    """Everything of a checkpoint, DONE last, flushed."""
    drafter: DFlashDrafter = accelerator.unwrap_model(model)
    state = accelerator.get_state_dict(model)  # gathers under ZeRO-3, so every rank calls it
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if deepspeed:
        pickle_stage_by_value()
        model.save_checkpoint(str(temporary / "resume"), tag="state")
    if accelerator.is_main_process:
        save_drafter(drafter, state, temporary, torch.bfloat16)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if not deepspeed:
            weights = {k: v.detach().cpu() for k, v in state.items()}
            torch.save(
                {"model": weights, "optimizer": optimizer.state_dict()},
                temporary / "resume" / "state.pt",
            )
        resume = temporary / "resume"
        trainer = {
            **trainer,
            "files": sorted(str(f.relative_to(resume)) for f in resume.rglob("*") if f.is_file()),
            "step": step,
            "world": accelerator.num_processes,
            "deepspeed": deepspeed,
        }
        atomic_write_json(temporary / "resume" / "trainer.json", trainer)
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
        seal(temporary)
        _flush(temporary / DONE)
        _flush(temporary)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def trainer_state(checkpoint: Path) -> dict[str, Any]:
    """resume/trainer.json, read before anything heavy is loaded."""
    file = checkpoint / "resume" / "trainer.json"
    if not file.exists():
        raise UserError(
            f"{checkpoint} has no resume state; it can be evaluated or used as drafter.init_from"
        )
    try:
        require_intact(checkpoint, "resume/trainer.json")
    except ValueError as error:
        raise UserError(str(error)) from None
    out: dict[str, Any] = json.loads(file.read_text())
    return out


def require_whole_resume(checkpoint: Path, accelerator: Accelerator, names: Sequence[str]) -> None:
    """UserError, on all ranks, that names the files of resume/ that are missing or damaged.

    DeepSpeed goes on without some of them. torch.save puts a CRC-32 beside every tensor, which torch.load does not
    read. Each rank looks at its share of the files.
    """
    broken = []
    for name in names[accelerator.process_index :: accelerator.num_processes]:
        file = checkpoint / "resume" / name
        if not file.exists():
            broken.append(f"{name} is missing")
        elif file.suffix == ".pt" and not _crc_holds(file):
            broken.append(f"{name} is damaged")
    if broken := gather_object(broken):
        raise UserError(
            f"{checkpoint}/resume cannot be gone on from: {', '.join(sorted(broken))}; delete {checkpoint} to go on from "
            f"the one before it, or start anew with drafter.init_from={checkpoint}"
        )


def _crc_holds(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, ValueError):
        return False  # its table of contents was hit


def pickle_stage_by_value() -> None:
    """DeepSpeed saves its ZeRO stage, an enum, which Python 3.11.2 pickles as a call of getattr: only_tensors, rightly,
    does not allow that. Newer Pythons pickle a call of the class, and so does this one now."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    def by_value(stage: Any, _protocol: int) -> tuple[Any, ...]:
        return type(stage), (stage.value,)

    ZeroStageEnum.__reduce_ex__ = by_value


@contextmanager
def only_tensors() -> Iterator[None]:
    """DeepSpeed's own torch.load unpickles whatever stands in its files; in here it takes tensors and three classes."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def load_checkpoint(checkpoint: Path, accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Restore weights and optimizer state into the prepared model and optimizer.

    UserError when the checkpoint was written by another number of processes under DeepSpeed (its optimizer state is
    cut up by rank), or by the other backend, or is damaged. All ranks call this.
    """
    saved = trainer_state(checkpoint)
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if saved["deepspeed"] != deepspeed:
        with_without = {True: "with DeepSpeed", False: "without DeepSpeed"}
        raise UserError(
            f"{checkpoint} was trained {with_without[saved['deepspeed']]} and this run is {with_without[deepspeed]}; "
            f"launch it as before, or start anew with drafter.init_from={checkpoint}"
        )
    if deepspeed and saved["world"] != accelerator.num_processes:
        raise UserError(
            f"{checkpoint} was trained by {saved['world']} processes and this run has "
            f"{accelerator.num_processes}; DeepSpeed's state is cut up by rank, so launch as many, or start anew "
            f"with drafter.init_from={checkpoint}"
        )
    require_whole_resume(checkpoint, accelerator, saved.get("files", []))
    try:
        if deepspeed:
            with only_tensors():
                loaded, _ = model.load_checkpoint(str(checkpoint / "resume"), tag="state")
            if loaded is None:
                raise UserError(
                    f"DeepSpeed could not load {checkpoint}/resume; use an earlier checkpoint"
                )
            return
        state = torch.load(
            checkpoint / "resume" / "state.pt", map_location="cpu", weights_only=True
        )
    except UnpicklingError:
        raise UserError(
            f"{checkpoint}/resume holds other things than tensors, which could run code and are not loaded; use a "
            "checkpoint of yours"
        ) from None
    accelerator.unwrap_model(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
