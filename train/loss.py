"""The objective: cross-entropy with position decay over the target's frozen head, in chunks.

    loss = sum_s w_s * CE_s / sum_s w_s        w of slot k: exp(-(k-1) / gamma), 0 where slot k is not supervised

Numerator and denominator are returned apart; the loop divides once, after adding them over ranks and accumulation.
No [slots, vocabulary] matrix outlives a chunk: its gradient is computed where it stands (the head is frozen, so a
chunk's gradient is all that is needed of it), and backward only scales what forward stored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from extract.head import TargetHead
from train.sampling import StepHead


def default_gamma(block_size: int) -> float:
    """7, 5, 4 for B = 16, 10, 8 (DFlash); half the block for other sizes."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)


def slot_weights(supervised: Tensor, gamma: float) -> Tensor:
    """supervised [R, A, B] bool -> float32 weights of the same shape."""
    k = torch.arange(supervised.shape[-1], device=supervised.device)
    return supervised * torch.exp(-(k - 1).float() / gamma)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: TargetHead | StepHead,
        targets: Tensor,
        weights: Tensor,
        teacher: Tensor | None,
        share: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        total = weights.new_zeros((), dtype=torch.float64)
        gradient = torch.empty_like(hidden, dtype=torch.float32)
        correct = torch.empty(len(targets), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            part = (hidden[rows], targets[rows], weights[rows])
            if isinstance(head, StepHead):
                loss, gradient[rows], correct[rows] = head.chunk(*part)
            else:
                some = None if teacher is None else teacher[rows]
                loss, gradient[rows], correct[rows] = _chunk(head, *part, some, share)
            total += loss
        ctx.save_for_backward(gradient)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(correct)
        return total.to(torch.float32), correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0]).to(ctx.dtype), None, None, None, None, None, None


def _chunk(
    head: TargetHead,
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    teacher: Tensor | None,
    share: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum, gradient [n, H] and correctness [n] of one chunk.

    With p = softmax(logits), dCE/dlogits = p - onehot, so dCE/dhidden = p W - W[target]: neither the one-hot nor the
    weights ever touch an [n, vocabulary] matrix. Distillation adds q = the teacher's softmax in the one-hot's place.
    """
    logits, slope = head.logits_with_slope(hidden)
    p = logits.softmax(-1)
    picked = logits.gather(1, targets[:, None]).float()
    correct = picked[:, 0] >= logits.amax(-1).float()
    log_norm = picked[:, 0] - p.gather(1, targets[:, None])[:, 0].float().clamp(min=1e-37).log()
    if logits.dtype == torch.float32:
        log_norm = torch.logsumexp(logits, -1)
    ce = log_norm - picked[:, 0]
    loss, wanted = ce, head.rows(targets)
    if slope is not None:  # soft cap: the derivative sits between logits and the product with W
        p = p * slope
        wanted = wanted * slope.gather(1, targets[:, None])
    if teacher is not None and share > 0:
        q = head.logits_with_slope(teacher)[0].softmax(-1)
        cross = log_norm - (q * logits).sum(-1, dtype=torch.float32)
        entropy = -torch.special.xlogy(q.float(), q.float()).sum(-1)
        loss = (1 - share) * ce + share * (cross - entropy)
        expected = head.from_logits(q if slope is None else q * slope)
        wanted = (1 - share) * wanted + share * expected
    gradient = (head.from_logits(p).float() - wanted.float()) * weights[:, None]
    return (loss.double() * weights).sum(), gradient, correct


def drafter_loss(
    hidden: Tensor,
    head: TargetHead | StepHead,
    targets: Tensor,
    weights: Tensor,
    *,
    teacher: Tensor | None = None,
    share: float = 0.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [N, H], targets [N], weights [N] -> (sum of w * loss, sum of w, correct [N] bool).

    `teacher` [N, H] is the target's own final normed state at the position before the predicted token; `share` of the
    loss is then KL(target || drafter).
    """
    numerator, correct = _ChunkedCrossEntropy.apply(
        hidden, head, targets, weights, teacher, share, chunk
    )
    return numerator, weights.sum(), correct


def plain_loss(hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The same numerator the obvious way, for tests and the benchmark."""
    return (F.cross_entropy(hidden @ head_weight.T, targets, reduction="none") * weights).sum()
