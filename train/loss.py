"""The loss of every slot over the target's frozen head, in chunks.

    loss_s = (1 - share) * CE(answer's token) + share * KL(target || drafter)

What a slot counts is train/weighting.py's business. No [slots, vocabulary] matrix outlives a chunk: its gradient is
computed where it stands (the head is frozen, so a chunk's gradient is all that is needed of it), and backward only
scales what forward stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from extract.head import TargetHead
from train.sampling import JoinedHead, StepHead


class SlotLosses(NamedTuple):
    """One value a slot, [N]. Only the loss carries a gradient."""

    loss: Tensor  # float32
    confidence: Tensor  # float32, the drafter's probability of the answer's token
    correct: Tensor  # bool


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: TargetHead | StepHead,
        targets: Tensor,
        teacher: Tensor | None,
        share: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(hidden, dtype=torch.float32)
        loss, confidence = gradient.new_empty(len(targets)), gradient.new_empty(len(targets))
        correct = gradient.new_empty(len(targets), dtype=torch.bool)
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            some = None if teacher is None else teacher[rows]
            loss[rows], confidence[rows], correct[rows], gradient[rows] = _chunk(
                head, hidden[rows], targets[rows], some, share
            )
        ctx.save_for_backward(gradient)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(confidence, correct)
        return loss, confidence, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0][:, None]).to(ctx.dtype), None, None, None, None, None


def _chunk(
    head: TargetHead | StepHead,
    hidden: Tensor,
    targets: Tensor,
    teacher: Tensor | None,
    share: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, confidence and correctness [n] and the loss's gradient [n, H] of one chunk.

    With p and q the softmax of drafter and teacher, dCE/dlogits = p - onehot and dKL/dlogits = p - q, so one product with
    the head gives both: (p - share q) W - (1 - share) W[target]. The one-hot never touches an [n, vocabulary] matrix.
    """
    seen: TargetHead | JoinedHead
    if isinstance(head, StepHead):
        seen, column = head.joined(targets), torch.full_like(targets, len(head.ids))
    else:
        seen, column = head, targets
    own = column[:, None]
    logits, slope = seen.logits_with_slope(hidden)
    p = logits.softmax(-1)
    log_norm = _log_norm(logits, p, own)
    picked = logits.gather(1, own)[:, 0].float()
    correct = picked >= logits.amax(-1).float()
    loss = cross_entropy = log_norm - picked
    pull = (1 - share) * seen.rows(targets).float()
    if teacher is not None and share > 0:
        wanted, _ = seen.logits_with_slope(teacher)
        q = wanted.softmax(-1)
        apart = (q * (wanted - logits)).sum(-1, dtype=torch.float32)
        loss = (1 - share) * loss + share * (apart + log_norm - _log_norm(wanted, q, own))
        p = p.sub_(q, alpha=share)
    if slope is not None:  # soft cap: the derivative sits between logits and the product with W
        p = p.mul_(slope)
        pull = pull * slope.gather(1, own)
    return loss, torch.exp(-cross_entropy), correct, seen.from_logits(p).float() - pull


def _log_norm(logits: Tensor, p: Tensor, own: Tensor) -> Tensor:
    """log-sum-exp of logits [n, C] with softmax p, in float32 [n]. In bfloat16 it is read off one token, whose column
    `own` [n, 1] names, since any other way goes through the chunk once more."""
    if logits.dtype == torch.float32:
        return logits.logsumexp(-1)
    mine = p.gather(1, own)[:, 0].float().clamp(min=1e-37)  # a loss ends at 85
    return logits.gather(1, own)[:, 0].float() - mine.log()


def slot_losses(
    hidden: Tensor,
    head: TargetHead | StepHead,
    targets: Tensor,
    *,
    teacher: Tensor | None = None,
    share: float = 0.0,
    chunk: int = 1024,
) -> SlotLosses:
    """hidden [N, H], targets [N] -> the slots' losses.

    `teacher` [N, H] is the target's own final normed state at the position before the predicted token; `share` of the
    loss is then KL(target || drafter), over the tokens that the head has.
    """
    if teacher is None and share > 0:
        raise ValueError(f"a share of {share} of KL needs the teacher's states")
    return SlotLosses(*_ChunkedLoss.apply(hidden, head, targets, teacher, share, chunk))
