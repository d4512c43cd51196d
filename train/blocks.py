"""Anchors and masks: which blocks a packed row is trained on, and what each slot sees.

A block of size B at anchor a has slots 0..B-1 at positions a..a+B-1. Slot 0 is the real token x[a], the others are mask
tokens, and slot k predicts x[a+k], or x[a+k+1] in a drafter that samples from the anchor. A slot sees
the context strictly below its anchor (in its own document) and its own block. tests/test_train_blocks.py has these rules
as loops.

Shapes: R rows, L tokens a row, A anchors, B block size, S = A*B slots. `document` numbers the documents of a packed row
from 0 and is -1 on padding; `position` counts from 0 in each document.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from train.drafter import SLIDING, DFlashDrafter, DraftShape, Mask, compiled

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def anchor_priority(seed: int, epoch: int, sample: int, length: int) -> np.ndarray:
    """A random number per token, [length]: the anchors of a row are its valid positions of highest priority.

    Counter-based (Philox), a function of its arguments alone, so anchors do not depend on rank, order or resume. Drawing
    counts the first word up: a sample there would start in the middle of the one before.
    """
    return np.random.Generator(
        np.random.Philox(key=[seed, epoch], counter=[0, 0, sample, 0])
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
    input_ids: Tensor, loss_mask: Tensor, document: Tensor, anchors: Tensor, shape: DraftShape
) -> tuple[Tensor, Tensor]:
    """What every slot predicts: (token ids [R, A, B], supervised [R, A, B] bool).

    A slot is supervised when all tokens after the anchor, up to its own, are supervised ones of the anchor's document: a
    block carries no weight past the end of a turn. Slots before the first that predicts and unused anchors never are.
    """
    length, first = input_ids.shape[1], shape.first
    start = anchors.clamp(min=0)
    ahead = torch.arange(shape.block_size, device=anchors.device) + 1 - first
    index = start[:, :, None] + ahead  # [R, A, B]
    inside = index < length
    flat = index.clamp(max=length - 1).flatten(1)
    take = lambda x: x.gather(1, flat).view_as(index)  # noqa: E731
    same = take(document) == document.gather(1, start)[:, :, None]
    good = inside & same & (take(loss_mask) > 0)
    good[:, :, :first] = True
    good = (good & (anchors >= 0)[:, :, None]).long().cumprod(dim=2).bool()
    good[:, :, :first] = False
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


def sight(
    document: Tensor,
    position: Tensor,
    anchors: Tensor,
    block_size: int,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Rule:
    """The rule of attention: (row, head, slot, key) -> does the slot see it? Keys are the L tokens, then the S slots.

    Context: same document and strictly below the anchor; with `window`, also within `window` positions of the slot
    itself. Own block: both directions, or with `causal` not beyond the slot. Unused anchors (-1) see their own block
    only, so that no row of the softmax is empty. Indices broadcast, so the one rule serves dense and sparse masks.
    """
    start, length = anchors.clamp(min=0), document.shape[1]
    own_document, own_position = document.gather(1, start), position.gather(1, start)

    def sees(row: Tensor, head: Tensor, slot: Tensor, key: Tensor) -> Tensor:
        block, token, other = slot // block_size, key.clamp(max=length - 1), key - length
        context = key < anchors[row, block]  # never true of another slot: anchors lie below L
        context = context & (document[row, token] == own_document[row, block])
        if window is not None:
            distance = own_position[row, block] + slot % block_size - position[row, token]
            context = context & (distance < window)
        own = other // block_size == block  # a token's is negative
        if causal:
            own = own & (other <= slot)
        return context | own

    return sees


def dense_mask(rule: Rule, rows: int, slots: int, keys: int, device: torch.device) -> Tensor:
    """[R, 1, S, L+S] bool, True where a slot sees. One mask for all heads."""
    at = partial(torch.arange, device=device)
    row, slot, key = at(rows)[:, None, None, None], at(slots)[:, None], at(keys)
    return rule(row, torch.zeros_like(row), slot, key)


def sparse_mask(rule: Rule, rows: int, slots: int, keys: int, device: torch.device) -> BlockMask:
    """The same for FlexAttention: which tiles have anything to see, and the rule for what lies within them.

    Compiled on CUDA, where the dense mask then exists tile by tile only; made through it elsewhere (tests).
    """
    make = compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return make(rule, rows, None, slots, keys, device=device)


def layer_masks(
    drafter: DFlashDrafter,
    document: Tensor,
    position: Tensor,
    anchors: Tensor,
    *,
    sparse: bool = False,
) -> dict[str, Mask]:
    """The mask of every kind of layer that this drafter has, for `DFlashDrafter.slots`.

    Dense masks go to SDPA, `sparse` ones to FlexAttention, which compiles anew for other shapes: for training rows,
    which all have one length.
    """
    config, shape = drafter.config, drafter.shape
    rows, slots = len(anchors), anchors.shape[1] * shape.block_size
    make = sparse_mask if sparse else dense_mask
    masks: dict[str, Mask] = {}
    for kind in set(config.layer_types):
        rule = sight(
            document,
            position,
            anchors,
            shape.block_size,
            window=config.sliding_window if kind == SLIDING else None,
            causal=shape.causal(kind),
        )
        masks[kind] = make(rule, rows, slots, document.shape[1] + slots, anchors.device)
    return masks
