"""A drafter on disk: model.safetensors and config.json, in the layout that engines load (z-lab DFlash).

Written with every convention explicit, and in DeepSpec's layout if it samples from the anchor; read in any layout that
train/released.py knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from train.drafter import DFlashDrafter, DraftShape
from train.finished import require_intact
from train.released import read_released

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_drafter(
    model: DFlashDrafter, state: dict[str, Tensor], folder: Path, dtype: torch.dtype
) -> None:
    """Write model.safetensors and config.json in the published layout (z-lab DFlash)."""
    names = set(model.state_dict())
    assert set(state) == names, f"weights to save differ from the drafter's: {set(state) ^ names}"
    write_weights(state, folder, dtype)
    write_config(checkpoint_config(model, dtype), folder)


def write_weights(state: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors leaves it to its owner alone; eval jobs read it too
    (folder / WEIGHTS).chmod(0o644)


def write_config(config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def checkpoint_config(model: DFlashDrafter, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a checkpoint: a Qwen3 config plus every DFlash convention, written out.

    What engines look for in two places (at the top level or in dflash_config) stands in both.
    """
    shape = model.shape
    assert shape.num_target_layers is not None, "a drafter is saved for a target that is known"
    out: dict[str, Any] = model.config.to_dict()
    if shape.causal_full:
        out["is_causal"] = True
    elif shape.causal_sliding:
        # absent means "sliding layers causal, full layers not" to the engines; a value rules all layers
        out.pop("is_causal", None)
    else:
        out["is_causal"] = False
    twice: dict[str, Any] = {
        "block_size": shape.block_size,
        "num_target_layers": shape.num_target_layers,
        "input_embedding_scale": shape.input_embedding_scale,
        "output_multiplier": shape.output_multiplier,
        "final_logit_softcapping": shape.final_logit_softcapping,
    }
    if shape.sample_from_anchor:  # DeepSpec's name for it, with its heads off
        out |= {
            "architectures": ["Qwen3DSparkModel"],
            "markov_rank": 0,
            "enable_confidence_head": False,
        }
        twice |= {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "sample_from_anchor": True,
        }
    else:
        out["architectures"] = ["DFlashDraftModel"]
    out.update(
        model_type="qwen3",
        dtype=str(dtype).removeprefix("torch."),
        **twice,
        dflash_config={
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "sample_from_anchor": shape.sample_from_anchor,
            **twice,
        },
    )
    if model.origin:
        out["paceline"] = model.origin
    return out


def origin_of(folder: Path) -> dict[str, Any]:
    """What made a checkpoint, as its config.json says; empty for a drafter of another project."""
    found = json.loads((folder / "config.json").read_text()).get("paceline")
    return found if isinstance(found, dict) else {}


def load_shape(folder: Path) -> tuple[Qwen3Config, DraftShape]:
    """What a checkpoint's config.json says. Raises ValueError, in one sentence, for what this code cannot represent."""
    require_intact(folder, "config.json")
    released = read_released(folder)
    return released.config, released.shape


def expected_of_states(config: Qwen3Config, shape: DraftShape) -> dict[str, Any]:
    """What a drafter asks of the states that it reads, by the names of a manifest."""
    depth = shape.num_target_layers
    return {
        "target_layer_ids": shape.target_layer_ids,
        "mask_token_id": shape.mask_token_id,
        "hidden_size": config.hidden_size,
    } | ({} if depth is None else {"num_target_layers": depth})


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32) -> DFlashDrafter:
    """A drafter from a checkpoint folder. Raises ValueError as load_shape does, and for damaged or unfit weights."""
    require_intact(folder)
    released = read_released(folder)
    model = DFlashDrafter(released.config, released.shape)
    state = {
        name: tensor
        for name, tensor in read_tensors(folder).items()
        if not name.startswith(released.targets_own)
    }
    ours = {name: p.shape for name, p in model.state_dict().items()}
    missing, unexpected = ours.keys() - state.keys(), state.keys() - ours.keys()
    if missing or unexpected:
        raise ValueError(
            f"{folder}/{WEIGHTS} does not fit its config.json: "
            f"missing {sorted(missing)[:3]}, unexpected {sorted(unexpected)[:3]}"
        )
    if wrong := [n for n in ours if state[n].shape != ours[n]]:
        raise ValueError(
            f"{folder}/{WEIGHTS} does not fit its config.json: {wrong[0]} is {list(state[wrong[0]].shape)} and should "
            f"be {list(ours[wrong[0]])}"
        )
    zero = [k for k, v in state.items() if v.dim() > 1 and not v.any()]
    if zero:
        raise ValueError(f"{folder}/{WEIGHTS} has all-zero matrices: {zero[:3]}")
    model.load_state_dict(state)
    model.origin = origin_of(folder)
    model = model.to(dtype)
    # The frequencies stay float32 as in training and in engines: rounded to bfloat16 they rotate otherwise.
    model.rotary = Qwen3RotaryEmbedding(model.config)
    return model


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of one or several files, without the prefix `model.` that some writers put."""
    files = [WEIGHTS]
    if (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    out: dict[str, Tensor] = {}
    for name in files:
        if Path(name).name != name or name == "..":
            raise ValueError(
                f"{folder}/{INDEX} names {name!r}, which is not a file of that folder; it is not read"
            )
        if not (folder / name).exists():
            raise ValueError(f"{folder} is not a drafter checkpoint: it has no {name}")
        out |= load_file(folder / name)
    return {name.removeprefix("model."): tensor for name, tensor in out.items()}
