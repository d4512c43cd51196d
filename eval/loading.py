"""What an evaluation reads, checked before anything is measured: checkpoints and held-out states."""

from __future__ import annotations

from pathlib import Path

import torch

from configs.load import UserError
from configs.schema import Config
from extract.manifest import held_out_folders, require
from extract.shards import ShardReader
from train.checkpoint import find_checkpoint
from train.drafter import DFlashDrafter, DraftShape
from train.finished import complete_checkpoints, step_of
from train.layout import expected_of_states, load_drafter, load_shape, origin_of


def checkpoints(run_dir: Path, wanted: str) -> list[Path]:
    """`latest`, `best`, `all`, a step folder's name or a folder. UserError when there is none."""
    if wanted != "all":
        return [find_checkpoint(run_dir, wanted)]
    if not (folders := complete_checkpoints(run_dir)):
        raise UserError(f"{run_dir} has no complete checkpoint; train first")
    return folders


def held_out_sets(config: Config) -> dict[str, ShardReader]:
    """The states of every set in eval.prompts, by name. UserError when they are not what this evaluation needs."""
    sets = open_sets(config)
    for name, reader in sets.items():
        check_set(config, name, reader)
    return sets


def open_sets(config: Config) -> dict[str, ShardReader]:
    """The same, whatever they are. UserError when there are none."""
    if not config.eval.prompts:
        raise UserError("eval.prompts names no held-out set; add at least one")
    return {name: ShardReader(folder) for name, folder in held_out_folders(config).items()}


def check_set(config: Config, name: str, reader: ShardReader) -> None:
    """Replay is exact for the target's own greedy answers in the precision of the evaluation, and for nothing else."""
    answers = reader.manifest.answers
    if not answers.greedy or answers.source == "given":
        raise UserError(
            f"the states of {name} are not of the target's own greedy answers; extract them again"
        )
    require(
        reader.manifest,
        reader.folder,
        target_dtype=config.eval.dtype,
        enable_thinking=config.target.enable_thinking,
        **{"answers.max_new_tokens": config.eval.max_new_tokens},
    )


def load_checked(
    folder: Path, sets: dict[str, ShardReader], device: torch.device, dtype: torch.dtype
) -> DFlashDrafter:
    """A drafter, checked against the states it is about to read. UserError names both sides."""
    checked_shape(folder, sets)
    try:
        drafter = load_drafter(folder, dtype)
    except ValueError as error:
        raise UserError(str(error)) from None
    for name, weights in drafter.named_parameters():
        if (
            not weights.isfinite().all()
        ):  # its drafts would be token 0 or so, and its tau an honest-looking 1
            raise UserError(f"{name} of {folder} has NaN or Inf; evaluate an earlier checkpoint")
    return drafter.to(device).eval().requires_grad_(False)


def checked_shape(folder: Path, sets: dict[str, ShardReader]) -> DraftShape:
    """What a checkpoint says of itself, checked against the states of its target. UserError names both sides."""
    try:
        drafter, shape = load_shape(folder)
    except ValueError as error:
        raise UserError(str(error)) from None
    for reader in sets.values():
        require(
            reader.manifest,
            reader.folder,
            **expected_of_states(drafter, shape),
            vocab_size=drafter.vocab_size,
        )
        require_own_target(folder, reader)
    return shape


def require_own_target(folder: Path, reader: ShardReader) -> None:
    """UserError when the drafter says that it was trained for other weights than the states are of.

    Another target of the same shape gives a tau like any other, only lower. Drafters of other projects do not say.
    """
    ours, theirs = reader.manifest.target, origin_of(folder).get("target")
    if isinstance(theirs, dict) and theirs.get("fingerprint") not in (None, ours.fingerprint):
        raise UserError(
            f"{folder} was trained for {theirs.get('id')} (weights {theirs['fingerprint']}) and the states in "
            f"{reader.folder} are of {ours.id} (weights {ours.fingerprint}); evaluate it on its own target, or adapt it "
            f"to this one: train with drafter.init_from={folder}"
        )


def step_number(checkpoint: Path) -> int | None:
    return step_of(checkpoint) if checkpoint.name.startswith("step-") else None
