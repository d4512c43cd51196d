"""What a drafter gets right, and whether it would get more right under another convention than its config.json's."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from eval.replay import draft_everywhere
from extract.head import TargetHead
from extract.shards import Sample
from train.drafter import DFlashDrafter

# Of a sample, the last ones: there the context is longest, and windows and rotations show.
ANCHORS = 64
# A difference counts from this many standard errors on (a dozen comparisons: one in ten thousand runs by chance) ...
ERRORS = 4.0
# ... and as this share of the accuracy: a convention that costs less than a twentieth of it explains no low tau.
WORTH = 1.05


@dataclass(frozen=True)
class Hits:
    """How many drafts are the answer's token at their place, or beside it; the same drafts for all shifts."""

    right: dict[int, int]  # by shift
    first: int  # of slot 1, right at shift 0
    blocks: int
    drafts: int
    slots: int  # of a block that draft

    def accuracy(self, shift: int = 0) -> float:
        """Share of all drafts."""
        return self.right[shift] / max(self.drafts, 1)

    @property
    def first_slot(self) -> float:
        return self.first / max(self.blocks, 1)

    @property
    def independent(self) -> float:
        """A token is drafted in every block before it, right or wrong together: `slots` drafts count as one."""
        return self.drafts / max(self.slots, 1)


def hits(
    drafter: DFlashDrafter,
    head: TargetHead,
    samples: Sequence[Sample],
    shifts: Sequence[int] = (0,),
) -> Hits:
    """Top-1 of every slot at the last ANCHORS supervised anchors of each sample.

    A block counts when all tokens from its anchor on, up to those that the shifts reach, are supervised. Slot 1 shifted
    by -1 is the anchor itself.
    """
    reach = max(shifts)
    right, first, blocks, size = torch.zeros(len(shifts), dtype=torch.int64), 0, 0, 0
    for sample in samples:
        ids, mask = sample.input_ids.long(), sample.loss_mask > 0
        start = max(
            int(mask.int().argmax()), len(ids) - drafter.shape.block_size - reach - ANCHORS + 1
        )
        logits = draft_everywhere(drafter, head, sample, start)
        said = torch.cat([x.argmax(-1).cpu() for x in logits])  # [anchors, drafts]
        size = said.shape[1]
        if len(said) <= size + reach:
            continue
        whole = mask[start:].unfold(0, size + reach + 1, 1).all(1)
        said = said[: len(whole)][whole]
        at = start + whole.nonzero() + torch.arange(1, size + 1)
        right += torch.stack([(said == ids[at + s]).sum() for s in shifts])
        first += int((said[:, 0] == ids[at[:, 0]]).sum())
        blocks += len(said)
    by_shift = dict(zip(shifts, right.tolist(), strict=True))
    return Hits(by_shift, first, blocks, blocks * size, size)


def clearly_better(theirs: float, ours: float, independent: float) -> bool:
    """Whether an accuracy of `theirs` over so many independent drafts is more than chance above `ours`, and matters."""
    mean = (theirs + ours) / 2
    error = math.sqrt(2 * mean * (1 - mean) / max(independent, 1))
    return theirs - ours > ERRORS * error and theirs > WORTH * ours


def variant(
    drafter: DFlashDrafter,
    *,
    shape: dict[str, Any] | None = None,
    rope: dict[str, Any] | None = None,
    **config: Any,
) -> DFlashDrafter:
    """The same weights under other fields of DraftShape, other rope_parameters or other fields of the config."""
    out = copy.copy(drafter)
    out._modules = dict(drafter._modules)  # which a copy shares
    out.config = copy.deepcopy(drafter.config)
    for name, value in config.items():
        setattr(out.config, name, value)
    out.shape = replace(drafter.shape, **(shape or {}))
    if rope is not None:
        out.config.rope_parameters = rope
        out.rotary = Qwen3RotaryEmbedding(out.config).to(drafter.fc.weight.device)
    return out


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Median over tokens of |ours - theirs| / |theirs|; both [T, H]. A massive activation of one token hides nothing."""
    length = theirs.float().norm(dim=-1).clamp(min=1e-6)
    return float(((ours.float() - theirs.float()).norm(dim=-1) / length).median())
