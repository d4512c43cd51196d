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

    def chunk(
        self, hidden: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As train.loss._chunk: (loss sum, gradient [n, H], correct among the step's tokens [n])."""
        rows = self.head.rows(targets)
        hidden = hidden.to(rows.dtype)
        own = (hidden.float() * rows.float()).sum(-1)
        if self.head.bias is not None:
            own = own + self.head.bias[targets].float()
        logits = torch.addmm(self.bias, hidden, self.weight.T)
        # the own target joins the normaliser once, as it is: drawn or not, without a correction
        logits = torch.where(self.ids == targets[:, None], logits.new_full((), -math.inf), logits)
        joined = torch.cat([logits, own[:, None].to(logits.dtype)], dim=1)
        p = joined.softmax(-1)
        mine = p[:, -1:].float()
        loss = -mine[:, 0].clamp(min=1e-37).log()
        gradient = (p[:, :-1] @ self.weight).float() + (mine - 1) * rows.float()
        correct = mine[:, 0] >= p[:, :-1].amax(-1).float()
        return (loss.double() * weights).sum(), gradient * weights[:, None], correct
