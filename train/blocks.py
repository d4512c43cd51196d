"""Anchors and masks: which blocks a packed row is trained on, and what each slot sees.

A block of size B at anchor a has slots 0..B-1 at positions a..a+B-1. Slot 0 is the real token x[a], the others are mask
tokens, and slot k predicts x[a+k]. A slot sees the context strictly below its anchor (in its own document) and its own
block. tests/test_train_blocks.py holds the same rules as loops.

Shapes: R rows, L tokens a row, A anchors, B block size, S = A*B slots. `document` numbers the documents of a packed row
from 0 and is -1 on padding; `position` counts from 0 in each document.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from train.drafter import SLIDING, DFlashDrafter


def anchor_priority(seed: int, epoch: int, sample: int, length: int) -> np.ndarray:
    """A random number per token, [length]: the anchors of a row are its valid positions of highest priority.

    Counter-based (Philox), a function of its arguments alone, so anchors do not depend on rank, order or resume.
    """
    return np.random.Generator(
        np.random.Philox(key=[seed, epoch], counter=[sample, 0, 0, 0])
    ).random(length)


def valid_anchors(loss_mask: Tensor, document: Tensor) -> Tensor:
    """[R, L] True where a block may start: the token and its successor are supervised, in one document."""
    own = loss_mask.bool() & (document >= 0)
    out = torch.zeros_like(own)
    out[:, :-1] = own[:, :-1] & own[:, 1:] & (document[:, :-1] == document[:, 1:])
    return out


def choose_anchors(valid: Tensor, priority: Tensor, count: int) -> Tensor:
    """[R, A] ascending positions of the anchors, -1 for unused places (at the end).

    Ascending, because neighbours then share attention tiles (field bug C9); the loss does not depend on it.
    """
    rows, length = valid.shape
    score = torch.where(valid, priority, priority.new_full((), -1.0))
    best = score.topk(min(count, length), dim=1)
    chosen = torch.where(best.values >= 0, best.indices, best.indices.new_full((), length))
    chosen = chosen.sort(dim=1).values
    chosen = torch.where(chosen == length, chosen.new_full((), -1), chosen)
    if count > length:
        chosen = torch.cat([chosen, chosen.new_full((rows, count - length), -1)], dim=1)
    return chosen


def block_targets(
    input_ids: Tensor, loss_mask: Tensor, document: Tensor, anchors: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """What every slot predicts: (token ids [R, A, B], supervised [R, A, B] bool).

    Slot k is supervised when all of x[a+1..a+k] are supervised tokens of the anchor's document: a block carries no
    weight past the end of a turn. Slot 0 and unused anchors never are.
    """
    length = input_ids.shape[1]
    start = anchors.clamp(min=0)
    index = start[:, :, None] + torch.arange(block_size, device=anchors.device)  # [R, A, B]
    inside = index < length
    flat = index.clamp(max=length - 1).flatten(1)
    take = lambda x: x.gather(1, flat).view_as(index)  # noqa: E731
    same = take(document) == document.gather(1, start)[:, :, None]
    good = inside & same & (take(loss_mask) > 0)
    good[:, :, 0] = anchors >= 0
    good = good.long().cumprod(dim=2).bool()
    good[:, :, 0] = False
    return take(input_ids), good


def slot_inputs(
    input_ids: Tensor, position: Tensor, anchors: Tensor, block_size: int, mask_token_id: int
) -> tuple[Tensor, Tensor]:
    """What every slot is fed: (token ids [R, S], positions [R, S])."""
    start = anchors.clamp(min=0)
    ids = input_ids.new_full((*anchors.shape, block_size), mask_token_id)
    ids[:, :, 0] = input_ids.gather(1, start)
    positions = position.gather(1, start)[:, :, None] + torch.arange(
        block_size, device=anchors.device
    )
    return ids.flatten(1), positions.flatten(1)


def block_mask(
    document: Tensor,
    position: Tensor,
    anchors: Tensor,
    block_size: int,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """[R, 1, S, L+S] bool, True where a slot sees. One mask for all heads.

    Context: same document and strictly below the anchor; with `window`, also within `window` positions of the slot
    itself. Own block: both directions, or with `causal` not beyond the slot. Unused anchors see their own block only,
    so that no row of the softmax is empty.
    """
    rows, count = anchors.shape
    length = document.shape[1]
    start = anchors.clamp(min=0)
    token = torch.arange(length, device=anchors.device)
    context = (
        (token[None, None, :] < start[:, :, None])
        & (document[:, None, :] == document.gather(1, start)[:, :, None])
        & (anchors >= 0)[:, :, None]
    )  # [R, A, L]
    context = context[:, :, None, :].expand(rows, count, block_size, length)
    if window is not None:
        slot_position = position.gather(1, start)[:, :, None] + torch.arange(
            block_size, device=anchors.device
        )
        distance = slot_position[..., None] - position[:, None, None, :]
        context = context & (distance < window)
    slot = torch.arange(count * block_size, device=anchors.device)
    own = slot[:, None] // block_size == slot[None, :] // block_size
    if causal:
        own &= slot[None, :] <= slot[:, None]
    own = own[None].expand(rows, -1, -1)
    return torch.cat([context.reshape(rows, count * block_size, length), own], dim=2)[:, None]


def layer_masks(
    drafter: DFlashDrafter, document: Tensor, position: Tensor, anchors: Tensor
) -> dict[str, Tensor | None]:
    """The mask of every kind of layer that this drafter has, for `DFlashDrafter.slots`."""
    config, shape = drafter.config, drafter.shape
    return {
        kind: block_mask(
            document,
            position,
            anchors,
            shape.block_size,
            window=config.sliding_window if kind == SLIDING else None,
            causal=kind == SLIDING and shape.causal_sliding,
        )
        for kind in set(config.layer_types)
    }
