"""A smaller softmax for the loss: sampled softmax over the target's head (Jean et al. 2015, arXiv:1412.2007).

The two products with the [vocabulary, H] head are most of a training step (more than half on SmolLM2, more still at a
vocabulary of 250 K). Here the normaliser runs over `count` tokens: half are the answers' most frequent tokens, the other
half are drawn anew every step from the rest and weighted so that they stand for all of it. A slot's own target is always
in its normaliser. Which tokens are drawn depends on (seed, step) alone, so a step stays the same for any split of its
rows. Training only: evaluation and decoding always use the whole head.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from extract.head import TargetHead


class SampledHead:
    """Draws the step's tokens."""

    def __init__(self, head: TargetHead, frequency: Tensor, count: int, seed: int) -> None:
        """frequency [V]: how often each token is supervised. ValueError when the head cannot be sampled."""
        vocabulary = len(head.weight)
        if head.soft_cap is not None:
            raise ValueError("a head with a soft cap cannot be sampled")
        if count >= vocabulary:
            raise ValueError(f"{count} tokens are not fewer than the vocabulary of {vocabulary}")
        order = torch.argsort(frequency.cpu(), descending=True, stable=True)
        self.frequent, self.rest = (
            order[: count // 2].sort().values,
            order[count // 2 :].sort().values,
        )
        self.head, self.drawn, self.seed = head, count - count // 2, seed

    def at(self, step: int) -> StepHead:
        generator = np.random.Generator(
            np.random.Philox(key=[self.seed, step], counter=[0, 2, 0, 0])
        )
        picked = generator.choice(len(self.rest), self.drawn, replace=False)
        ids = torch.cat([self.frequent, self.rest[torch.from_numpy(np.sort(picked))]]).to(
            self.head.weight.device
        )
        correction = torch.zeros(len(ids), device=ids.device)
        correction[len(self.frequent) :] = math.log(len(self.rest) / self.drawn)
        return StepHead(self.head, ids, correction)


class StepHead:
    """The head of one step: `ids` [C] and what is added to their logits, [C]."""

    def __init__(self, head: TargetHead, ids: Tensor, correction: Tensor) -> None:
        self.head, self.ids = head, ids
        self.weight = head.weight[ids]
        bias = correction if head.bias is None else correction + head.bias[ids].float()
        self.bias = bias.to(head.weight.dtype)

    def joined(self, targets: Tensor) -> JoinedHead:
        return JoinedHead(self, targets)


class JoinedHead:
    """A step's head as slots with these targets [n] see it: C tokens and, in column C, the slot's own target.

    The own target joins once, as it is: drawn or not, without a correction. The teacher's distribution is taken over
    the same columns with the same corrections, so KL compares two estimates of one kind.
    """

    def __init__(self, step: StepHead, targets: Tensor) -> None:
        self.step = step
        self.own = step.head.rows(targets)
        self.own_bias = None if step.head.bias is None else step.head.bias[targets].float()
        self.drawn = step.ids == targets[:, None]

    def logits_with_slope(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[n, H] -> [n, C + 1], in the head's dtype; there is no soft cap, so no slope."""
        hidden = hidden.to(self.own.dtype)
        own = (hidden.float() * self.own.float()).sum(-1)
        if self.own_bias is not None:
            own = own + self.own_bias
        logits = torch.addmm(self.step.bias, hidden, self.step.weight.T)
        # finite, because the loss takes differences of logits
        logits = logits.masked_fill_(self.drawn, torch.finfo(logits.dtype).min)
        return torch.cat([logits, own[:, None].to(logits.dtype)], dim=1), None

    def rows(self, targets: Tensor) -> Tensor:
        return self.own

    def from_logits(self, gradient: Tensor) -> Tensor:
        """A gradient with respect to logits [n, C + 1] -> with respect to hidden [n, H]."""
        others = gradient[:, :-1] @ self.step.weight
        return others.float() + gradient[:, -1:].float() * self.own.float()
