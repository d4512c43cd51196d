"""How much each slot of a block counts, and what the weighted losses are divided by.

    decay     w_k = exp(-(k-1) / gamma)                                                    divided by the sum of w
    uniform   w_k = 1                                                                      divided by the sum of w
    dpace     w_k = sum over m >= k of c_1 * ... * c_m,  c_i = (1-alpha) q_i + alpha      divided by the blocks

D-PACE (arXiv:2605.18810, equations 7-9): q_i is the drafter's probability of the answer's token in slot i, so the
weights of a block are its expected accepted length, cut at k, and move to the slots that limit it now. They are
constants in the gradient. Its author asks for the number of blocks as the divisor (SpecForge issue 828): the sum of the
weights would cancel what they say about the block as a whole. So the divisor of every weighting is known before the
forward, and one reduction gives all micro-batches and ranks the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

DPACE_ALPHA = 0.5  # the paper's


def default_gamma(block_size: int) -> float:
    """7, 5, 4 for B = 16, 10, 8 (DFlash); half the block for other sizes."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)


def decay_weights(supervised: Tensor, gamma: float) -> Tensor:
    """supervised [..., B] bool -> float32 weights of the same shape."""
    k = torch.arange(supervised.shape[-1], device=supervised.device)
    return supervised * torch.exp(-(k - 1).float() / gamma)


def dpace_weights(confidence: Tensor, supervised: Tensor) -> Tensor:
    """confidence [..., B], the probabilities q, and supervised [..., B] bool -> weights of the same shape.

    A slot that is not supervised (slot 0, past a turn's end) neither counts nor stands in another's way.
    """
    smoothed = (1 - DPACE_ALPHA) * confidence.detach() + DPACE_ALPHA
    reached = torch.where(supervised, smoothed, 1.0).cumprod(-1) * supervised
    return reached.flip(-1).cumsum(-1).flip(-1) * supervised
