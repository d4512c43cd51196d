"""A new drafter: random, started from the target's own last layers, or continued from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.load import UserError
from configs.schema import Config
from extract.manifest import Manifest, require
from extract.target import Target, load_model_config, load_target, locate, unpack_gguf
from train.drafter import FULL, SLIDING, DFlashDrafter, DraftShape, drafter_config
from train.layout import load_drafter


def build_drafter(config: Config, manifest: Manifest) -> DFlashDrafter:
    """The drafter that training starts from, in float32, the same on every rank."""
    options = config.drafter
    if options.init_from not in (None, "target"):
        return continued(Path(str(options.init_from)), config, manifest)
    target_config = load_model_config(config.target, unpack_gguf(locate(config.target)))
    layer_types = [
        SLIDING if i in options.sliding_layers else FULL for i in range(options.num_layers)
    ]
    model = DFlashDrafter(
        drafter_config(
            target_config,
            num_hidden_layers=options.num_layers,
            intermediate_size=options.intermediate_size,
            num_attention_heads=options.num_attention_heads,
            num_key_value_heads=options.num_key_value_heads,
            head_dim=options.head_dim,
            layer_types=layer_types,
            sliding_window=options.sliding_window,
            use_sliding_window=options.sliding_window is not None,
        ),
        DraftShape(
            block_size=options.block_size,
            mask_token_id=manifest.mask_token_id,
            target_layer_ids=manifest.target_layer_ids,
            num_target_layers=manifest.num_target_layers,
            causal_sliding=options.causal_sliding,
        ),
    )
    model.reset_parameters(config.seed)
    if options.init_from == "target":
        start_from_target(model, load_target(config.target, dtype="float32"))
    return model


def continued(folder: Path, config: Config, manifest: Manifest) -> DFlashDrafter:
    """drafter.init_from=FOLDER. UserError when the checkpoint is not of this target and these states."""
    if not folder.is_dir():
        raise UserError(
            f"drafter.init_from {folder} does not exist; give a checkpoint folder or `target`"
        )
    try:
        model = load_drafter(folder)
    except ValueError as error:
        raise UserError(str(error)) from None
    shape = model.shape
    require(
        manifest,
        folder,
        target_layer_ids=shape.target_layer_ids,
        mask_token_id=shape.mask_token_id,
        num_target_layers=shape.num_target_layers,
        hidden_size=model.config.hidden_size,
    )
    wanted = (config.drafter.block_size, config.drafter.num_layers)
    if (shape.block_size, model.config.num_hidden_layers) != wanted:
        raise UserError(
            f"{folder} has block size {shape.block_size} and {model.config.num_hidden_layers} layers, the config says "
            f"{wanted[0]} and {wanted[1]}"
        )
    return model


@torch.no_grad()
def start_from_target(model: DFlashDrafter, target: Target) -> None:
    """Copy the target's last layers and final norm into the drafter, where the shapes agree.

    The residual stream, the embedding and the head are the target's, so its last layers already know how to write for
    that head. Context comes from the deepest tap (fc starts as a selection of it). q_norm and k_norm, which a target
    may lack, start at the typical size that the copied projections give to unit-size input.
    """
    drafter: Any = model
    for layer, source in zip(drafter.layers, target.layers[-len(drafter.layers) :], strict=True):
        ours = dict(layer.named_parameters())
        theirs = dict(source.named_parameters())
        for name, p in ours.items():
            if name in theirs and theirs[name].shape == p.shape:
                p.copy_(theirs[name])
        attention = layer.self_attn
        scale = layer.input_layernorm.weight
        for projection, norm, name in (
            (attention.q_proj, attention.q_norm, "q_norm"),
            (attention.k_proj, attention.k_norm, "k_norm"),
        ):
            if f"self_attn.{name}.weight" not in theirs:
                norm.weight.fill_(_typical_size(projection, scale))
    drafter.norm.weight.copy_(target.decoder.norm.weight)
    drafter.hidden_norm.weight.copy_(drafter.layers[0].input_layernorm.weight)
    hidden = drafter.config.hidden_size
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, -hidden:] += torch.eye(hidden)


def _typical_size(projection: nn.Linear, scale: Tensor) -> float:
    """Root mean square of projection(x * scale) for x of independent unit entries."""
    return float(((projection.weight * scale) ** 2).sum(1).mean().sqrt())
