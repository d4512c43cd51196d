"""The next token, by the rules of transformers' `generate`.

The settings become transformers' own processors in the order in which `generate` applies them (repetition penalty,
temperature, top-k, top-p, min-p), so what is sampled here is what `generate` would sample from the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from configs.schema import EvalConfig


@dataclass(frozen=True)
class Sampler:
    """How the next token is picked. Temperature 0 is greedy, and the lowest id wins a tie."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0  # over prompt and answer, as in `generate`

    def __post_init__(self) -> None:
        idle = self.greedy and self.settings.keys() & {"top_k", "top_p", "min_p"}
        assert not idle, f"greedy decoding knows no {idle}"

    @classmethod
    def of(cls, options: EvalConfig) -> Sampler:
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    @property
    def settings(self) -> dict[str, float]:
        """The settings that differ from plain greedy decoding, by name."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}

    @property
    def greedy(self) -> bool:
        """The same prefix always gets the same token."""
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """Greedy and nothing else: the prefix plays no part, an argmax of the logits is the token."""
        return not self.settings

    @cached_property
    def processors(self) -> list[LogitsProcessor]:
        out: list[LogitsProcessor] = []
        if self.repetition_penalty != 1:
            out.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.temperature not in (0, 1):
            out.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            out.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            out.append(TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            out.append(MinPLogitsWarper(self.min_p))
        return out

    def scores(self, logits: Tensor, prefixes: Tensor) -> Tensor:
        """Processed logits [n, V], float32 as in `generate`. prefixes: int64 [n, T], prompt and answer up to each row."""
        scores = logits.float()
        for process in self.processors:
            scores = process(prefixes, scores)
        return scores

    def choose(
        self,
        logits: Tensor,
        prefixes: Tensor,
        generators: Sequence[torch.Generator | None] | None = None,
    ) -> Tensor:
        """The next token of every row, [n, V] -> int64 [n]: the best one or, with a temperature, one draw.

        Each row draws from its own generator, so what it says does not depend on its company; None is torch's global
        generator.
        """
        if self.plain:
            return logits.argmax(-1)  # the first (lowest) index of equal values, on CPU and CUDA
        scores = self.scores(logits, prefixes)
        if self.greedy:
            return scores.argmax(-1)
        rows = scores.softmax(-1)
        draws = [
            torch.multinomial(row, 1, generator=generator)
            for row, generator in zip(rows, generators or [None] * len(rows), strict=True)
        ]
        return torch.cat(draws)


GREEDY = Sampler()
