"""What an evaluation reads, checked before anything is measured: checkpoints, held-out states, earlier results."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from configs.load import UserError
from configs.provenance import file_sha256, fingerprint
from configs.schema import Config
from eval.results import read_results
from extract.choose import Sampler
from extract.manifest import require
from extract.shards import ShardReader
from train.checkpoint import complete_checkpoints, find_checkpoint, step_of
from train.drafter import DFlashDrafter, DraftShape
from train.layout import load_drafter, load_shape


def checkpoints(run_dir: Path, wanted: str) -> list[Path]:
    """`latest`, `all`, a step folder's name or a folder. UserError when there is none."""
    if wanted != "all":
        return [find_checkpoint(run_dir, wanted)]
    if not (folders := complete_checkpoints(run_dir)):
        raise UserError(f"{run_dir} has no complete checkpoint; train first")
    return folders


def held_out_sets(config: Config) -> dict[str, ShardReader]:
    """The states of every set in eval.prompts, by name. UserError when they are not what this evaluation needs."""
    if not config.eval.prompts:
        raise UserError("eval.prompts names no held-out set; add at least one")
    root = Path(config.run_dir) / "eval-sets"
    sets = {
        Path(name).stem: ShardReader(root / Path(name).stem / "states")
        for name in config.eval.prompts
    }
    for name, reader in sets.items():
        check_set(config, name, reader)
    return sets


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
            target_layer_ids=shape.target_layer_ids,
            num_target_layers=shape.num_target_layers,
            mask_token_id=shape.mask_token_id,
            hidden_size=drafter.hidden_size,
            vocab_size=drafter.vocab_size,
        )
    return shape


def results_folder(run_dir: Path, checkpoint: Path, mode: str) -> Path:
    """evals/step-000200 for replay, which every checkpoint gets; its other results lie in folders below."""
    folder = run_dir / "evals" / checkpoint.resolve().name
    return folder if mode == "replay" else folder / mode


def evaluated(results: Path, checkpoint: Path, settings: str) -> bool:
    """Whether these results are of these weights and were made with these settings."""
    file = results / "results.json"
    if not file.exists():
        return False
    found = read_results(file)
    return (found["checkpoint"]["fingerprint"], found.get("settings")) == (
        fingerprint_of(checkpoint),
        settings,
    )


def settings_of(
    config: Config, mode: str, sets: dict[str, ShardReader], server: str | None = None
) -> str:
    """A fingerprint of what a result depends on beside the drafter's weights."""
    options = {k: str(v) for k, v in config.eval.model_dump().items()}
    if mode == "replay":
        for name in ("live_prompts", *(f.name for f in fields(Sampler))):
            options.pop(name)
    else:
        options |= {"seed": str(config.seed), "server": str(server)}
    states = {
        name: [r.manifest.data_fingerprint, r.manifest.target.fingerprint]
        for name, r in sets.items()
    }
    return fingerprint({"options": options, "states": states})


def step_number(checkpoint: Path) -> int | None:
    return step_of(checkpoint) if checkpoint.name.startswith("step-") else None


def fingerprint_of(checkpoint: Path) -> str:
    return file_sha256(checkpoint / "model.safetensors")[:16]
