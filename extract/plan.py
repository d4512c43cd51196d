"""Which sample goes to which shard, and which share a target forward: decided before the first one.

    for shard in owned(plan(lengths, shard_tokens=65536, batch_tokens=8192), rank, world):
        ...

Nothing here depends on the number of processes, so that a shard's content never does either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.load import UserError

MAX_SHARD_SAMPLES = 65536  # their ids are in the header, and safetensors reads 100 MB of header
MAX_SHARDS = 10**6  # six digits in a name


@dataclass(frozen=True)
class ShardPlan:
    index: int
    samples: tuple[int, ...]  # numbers in the data, in stored order
    batches: tuple[tuple[int, ...], ...]  # the same numbers: one target forward each, longest first

    @property
    def name(self) -> str:
        return shard_name(self.index)


def shard_name(index: int) -> str:
    return f"shard-{index:06d}.safetensors"


def plan(lengths: Sequence[int], *, shard_tokens: int, batch_tokens: int) -> list[ShardPlan]:
    """Deal samples of these lengths to shards, in data order, and to batches within a shard.

    A shard is closed before it would exceed shard_tokens, a batch before its padded size would
    exceed batch_tokens; only a single longer sample may. Raises UserError for too many shards.
    """
    if any(length <= 0 for length in lengths):
        raise ValueError("every sample needs at least one token")
    shards: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if length > room or len(shards[-1]) == MAX_SHARD_SAMPLES:
            shards.append([])
            room = shard_tokens
        shards[-1].append(number)
        room -= length
    if len(shards) > MAX_SHARDS:
        raise UserError(
            f"extract.shard_tokens={shard_tokens} makes {len(shards)} shards, more than "
            f"{MAX_SHARDS}; raise it"
        )
    return [
        ShardPlan(index, tuple(numbers), _batches(numbers, lengths, batch_tokens))
        for index, numbers in enumerate(shards)
    ]


def _batches(
    numbers: Sequence[int], lengths: Sequence[int], batch_tokens: int
) -> tuple[tuple[int, ...], ...]:
    batches: list[list[int]] = []
    for number in sorted(numbers, key=lambda n: -lengths[n]):
        # Longest first: the first of a batch is what the others are padded to.
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > batch_tokens:
            batches.append([])
        batches[-1].append(number)
    return tuple(tuple(batch) for batch in batches)


def owned(plans: Sequence[ShardPlan], rank: int, world: int) -> Sequence[ShardPlan]:
    return plans[rank::world]
