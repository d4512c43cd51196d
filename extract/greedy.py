"""How much of the supervised text is what the target itself would say: its greedy choice, given the tokens before.

A drafter learns to predict the target. Taught on somebody else's text it learns the wrong thing, and only this share
shows it before the training has been paid for. Where `last_hidden` is stored the head beside it answers; otherwise the
target is loaded and asked on a few samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from extract.head import load_head
from extract.prompts import Ids
from extract.shards import ShardReader
from extract.target import Target

ASKED = 64  # samples that the target is run on: some thousand tokens, the share within a percent
READ = (
    1024  # samples of which the stored last states are read; the head of a large target is not free
)
CHUNK = 512  # positions whose logits exist at a time


class Tokens(Protocol):
    """A sample's ids and mask, from a shard or from an answer's file."""

    @property
    def input_ids(self) -> Tensor | Ids: ...
    @property
    def loss_mask(self) -> Tensor | Ids: ...


class Samples(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Tokens: ...


@dataclass(frozen=True)
class Share:
    """`agreed` of `tokens` supervised tokens, in `samples` samples, are the target's greedy choice."""

    agreed: int
    tokens: int
    samples: int

    @property
    def value(self) -> float:
        return self.agreed / max(self.tokens, 1)


def from_stored_states(reader: ShardReader, folder: Path, device: torch.device) -> Share:
    """By the stored last hidden states and the head beside them; exact, up to READ samples."""
    head = load_head(folder, device=device)

    def hidden(number: int) -> Tensor:
        states = reader[number].last_hidden
        assert states is not None
        return states.to(device)

    return _share(reader, READ, hidden, head.logits)


@torch.inference_mode()
def from_target(samples: Samples, target: Target) -> Share:
    """By plain forwards of the target over ASKED of the samples, one at a time."""

    def hidden(number: int) -> Tensor:
        ids = torch.as_tensor(samples[number].input_ids, dtype=torch.int64, device=target.device)
        states: Tensor = target.decoder(input_ids=ids[None]).last_hidden_state[0]
        return states

    return _share(samples, ASKED, hidden, target.logits)


def _share(
    samples: Samples,
    count: int,
    hidden: Callable[[int], Tensor],
    logits: Callable[[Tensor], Tensor],
) -> Share:
    """Over `count` samples, evenly spaced. hidden(number) [T, H] after the final norm, logits [n, H] -> [n, V]."""
    numbers = sorted({k * len(samples) // count for k in range(count)})
    agreed = tokens = 0
    for number in numbers:
        ids = torch.as_tensor(samples[number].input_ids, dtype=torch.int64)
        mask = torch.as_tensor(samples[number].loss_mask)
        states = hidden(number)
        for at in mask[1:].nonzero().squeeze(1).split(CHUNK):  # the state at t predicts t + 1
            said = logits(states[at.to(states.device)]).argmax(-1).cpu()
            agreed += int((said == ids[at + 1]).sum())
            tokens += len(at)
    return Share(agreed, tokens, len(numbers))
