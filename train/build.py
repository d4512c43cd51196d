"""A new drafter: random, started from the target's own last layers, or continued from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.load import UserError
from configs.provenance import fingerprint
from configs.schema import Config
from extract.head import read_use
from extract.locate import load_model_config, locate, unpack_gguf
from extract.manifest import Manifest, require
from extract.target import Target, load_target
from train.drafter import FULL, SLIDING, DFlashDrafter, DraftShape, drafter_config
from train.layout import expected_of_states, load_drafter

WIDTHS = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
)


def build_drafter(config: Config, manifest: Manifest) -> DFlashDrafter:
    """The drafter that training starts from, in float32, the same on every rank."""
    source = config.drafter.init_from
    if source in (None, "target"):
        model = fresh(config, manifest)
        model.reset_parameters(config.seed)
        if source == "target":
            start_from_target(model, load_target(config.target, dtype="float32"))
    else:
        model = continued(Path(str(source)), config, manifest)
    model.origin = {
        "config_fingerprint": fingerprint(config.model_dump(mode="json")),
        "data_fingerprint": manifest.data_fingerprint,
        "target": manifest.target.model_dump(),
        "enable_thinking": manifest.enable_thinking,
    }
    return model


def fresh(config: Config, manifest: Manifest) -> DFlashDrafter:
    """A drafter of the configured shape that uses the target's tables as the target does; weights still to be set."""
    options = config.drafter
    scale, soft_cap = read_use(Path(config.run_dir) / "states")
    target_config = load_model_config(config.target, unpack_gguf(locate(config.target)))
    layer_types = [
        SLIDING if i in options.sliding_layers else FULL for i in range(options.num_layers)
    ]
    return DFlashDrafter(
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
            input_embedding_scale=scale,
            final_logit_softcapping=soft_cap,
        ),
    )


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
    require(manifest, folder, **expected_of_states(model.config, shape))
    wanted = (config.drafter.block_size, config.drafter.num_layers)
    if (shape.block_size, model.config.num_hidden_layers) != wanted:
        raise UserError(
            f"{folder} has block size {shape.block_size} and {model.config.num_hidden_layers} layers, the config says "
            f"{wanted[0]} and {wanted[1]}"
        )
    sliding = [i for i, kind in enumerate(model.config.layer_types) if kind == SLIDING]
    found = {
        **{name: getattr(model.config, name) for name in WIDTHS},
        "sliding_layers": tuple(sliding),
        "causal_sliding": shape.causal_sliding,
    }
    for name in config.drafter.model_fields_set & found.keys():
        given = getattr(config.drafter, name)
        if given is not None and given != found[name]:
            raise UserError(
                f"drafter.{name} is {given} but {folder} has {found[name]}; remove it or start anew"
            )
    _, soft_cap = read_use(Path(config.run_dir) / "states")
    if config.train.distillation > 0 and soft_cap != shape.final_logit_softcapping:
        raise UserError(
            f"train.distillation needs one soft cap for both, but {folder} has final_logit_softcapping "
            f"{shape.final_logit_softcapping} and the target {soft_cap}; set train.distillation to 0"
        )
    model.shape = replace(shape, num_target_layers=manifest.num_target_layers)
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
