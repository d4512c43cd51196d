"""The checkpoint layout that serving engines load: model.safetensors and config.json (z-lab DFlash)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from train.drafter import SLIDING, DFlashDrafter, DraftShape


def save_drafter(
    model: DFlashDrafter, state: dict[str, Tensor], folder: Path, dtype: torch.dtype
) -> None:
    """Write model.safetensors and config.json in the published layout (z-lab DFlash)."""
    names = set(model.state_dict())
    assert set(state) == names, f"weights to save differ from the drafter's: {set(state) ^ names}"
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(
        0o644
    )  # safetensors leaves it to its owner alone; eval jobs read it too
    (folder / "config.json").write_text(
        json.dumps(checkpoint_config(model, dtype), indent=2) + "\n"
    )


def checkpoint_config(model: DFlashDrafter, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a checkpoint: a Qwen3 config plus every DFlash convention, written out."""
    shape = model.shape
    out: dict[str, Any] = model.config.to_dict()
    if shape.causal_sliding:
        # absent means "sliding layers causal, full layers not" to the engines; a value rules all layers
        out.pop("is_causal", None)
    else:
        out["is_causal"] = False
    out.update(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        dtype=str(dtype).removeprefix("torch."),
        block_size=shape.block_size,
        num_target_layers=shape.num_target_layers,
        dflash_config={
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "sample_from_anchor": False,
        },
    )
    return out


def load_shape(folder: Path) -> tuple[Qwen3Config, DraftShape]:
    """What a checkpoint's config.json says. Raises ValueError, in one sentence, for what this code cannot represent."""
    file = folder / "config.json"
    if not file.exists():
        raise ValueError(f"{folder} is not a drafter checkpoint: it has no config.json")
    raw = json.loads(file.read_text())
    dflash = raw.get("dflash_config") or {}
    if "DFlashDraftModel" not in (raw.get("architectures") or []):
        raise ValueError(
            f"{file} is of architecture {raw.get('architectures')}, not DFlashDraftModel"
        )
    if dflash.get("sample_from_anchor"):
        raise ValueError(
            f"{file} drafts from slot 0 as well (sample_from_anchor), which is not supported"
        )
    if raw.get("is_causal"):
        raise ValueError(
            f"{file} is causal inside the block in every layer (is_causal), which is not supported"
        )
    names = ("block_size", "num_target_layers", "mask_token_id", "target_layer_ids")
    found = {
        name: dflash.get(name, raw.get(name)) for name in names
    }  # nested wins, as in the engines
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}")
    sliding = SLIDING in (raw.get("layer_types") or [])
    shape = DraftShape(
        block_size=found["block_size"],
        mask_token_id=found["mask_token_id"],
        target_layer_ids=tuple(found["target_layer_ids"]),
        num_target_layers=found["num_target_layers"],
        causal_sliding=sliding and raw.get("is_causal") is None,
    )
    return Qwen3Config.from_dict(raw), shape


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32) -> DFlashDrafter:
    """A drafter from a checkpoint folder. Raises ValueError as load_shape does, and for weights that do not fit."""
    config, shape = load_shape(folder)
    model = DFlashDrafter(config, shape)
    state = load_file(folder / "model.safetensors")
    problems = model.load_state_dict(state, strict=False)
    if problems.missing_keys or problems.unexpected_keys:
        raise ValueError(
            f"{folder}/model.safetensors does not fit its config.json: "
            f"missing {problems.missing_keys[:3]}, unexpected {problems.unexpected_keys[:3]}"
        )
    zero = [k for k, v in state.items() if v.dim() > 1 and not v.any()]
    if zero:
        raise ValueError(f"{folder}/model.safetensors has all-zero matrices: {zero[:3]}")
    return model.to(dtype)
