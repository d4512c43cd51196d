"""Proof, on one sequence and before anything is stored, that a loaded target's states are what they are said to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from configs.load import UserError
from extract.target import Target


def probe(target: Target, taps: Sequence[int], ids: Sequence[int]) -> None:
    """Prove on one sequence that the states are what design.md 2 says they are. UserError when not.

    Each tap must equal transformers' own hidden state of that layer. The entry after the last block is post-norm, so
    there the tap is compared through the final norm. `last_hidden` must give the target's own logits. And in a padded
    batch every token must have the states that it has in a batch of one.
    """
    x = torch.tensor([list(ids)[:64]], device=target.device)
    features, last_hidden = target.forward_taps(x, taps)
    name = target.label
    with torch.no_grad():
        out = target.model(input_ids=x, output_hidden_states=True)
        for tap, state in zip(taps, _by_tap(target, features), strict=True):
            theirs = out.hidden_states[tap + 1].to(target.device)
            if tap == len(target.layers) - 1:
                state = _final_norm(target)(state)
            _close(state, theirs, f"the states of tap {tap} of {name}", "a plain forward")
        _close(
            target.logits(last_hidden),
            out.logits.to(target.device),
            f"the logits of {name} from its last hidden state",
            "a plain forward",
        )
    start = x.shape[1] // 3
    batch = torch.cat([torch.nn.functional.pad(x[:, start:], (0, start)), x])
    together, last = target.forward_taps(batch, taps)
    short, short_last = target.forward_taps(x[:, start:], taps)
    for batched, alone in (
        (together[1:], features),
        (together[:1, : short.shape[1]], short),
        (last[1:], last_hidden),
        (last[:1, : short.shape[1]], short_last),
    ):
        for ours, theirs in zip(_by_tap(target, batched), _by_tap(target, alone), strict=True):
            _close(
                ours, theirs, f"the states of {name} in a batch", "a batch of one", same_shape=False
            )


def _final_norm(target: Target) -> Any:
    if not hasattr(target.decoder, "norm"):
        raise UserError(
            f"the final norm of {target.label} has another name than `norm`, so its deepest layer cannot be checked; "
            "leave it out of drafter.target_layer_ids"
        )
    return target.decoder.norm


def _by_tap(target: Target, features: Tensor) -> tuple[Tensor, ...]:
    return features.split(target.config.hidden_size, dim=-1)


# How far a token's vector may lie from the reference, as a share of its length; another token's is tens of per cent away.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def _close(ours: Tensor, theirs: Tensor, what: str, than: str, *, same_shape: bool = True) -> None:
    # By token: a single massive activation would hide everything behind a largest element.
    length = theirs.float().norm(dim=-1).clamp(min=1e-6)
    off = (ours.float() - theirs.float()).norm(dim=-1) / length
    # In bfloat16 another shape rounds otherwise, and a near-tie between experts may send one token elsewhere.
    judged = off.max() if same_shape or ours.dtype == torch.float32 else off.median()
    difference, limit = float(judged), LIMITS.get(ours.dtype, 5e-2)
    if not difference <= limit:
        raise UserError(
            f"{what} differ from {than} by {difference:.1e} (limit {limit:.0e}); this target does not "
            "work with this transformers release, please report it"
        )
