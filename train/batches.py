"""From samples on disk to packed rows: what a step is made of is a function of (seed, epoch, step) alone.

Samples are packed once into rows of `max_length` tokens. Every epoch visits all rows in an order of its own; step s of
an epoch takes the next world * accumulation * batch rows of that order, rank by rank. The last step of an epoch is
filled with empty rows, which weigh nothing, so every rank always has the same number of micro-steps and each sample is
read exactly once an epoch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from extract.shards import Sample, ShardReader
from extract.window import WindowReader
from train.blocks import anchor_priority


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Sample numbers of each row: best fit, longest first. Longer samples count as max_length (they are cut)."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    order = sorted(range(len(lengths)), key=lambda i: (-min(lengths[i], max_length), i))
    for sample in order:
        size = min(lengths[sample], max_length)
        at = bisect.bisect_left(room, (size, -1))
        if at == len(room):
            free, row = max_length, len(rows)
            rows.append([])
        else:
            free, row = room.pop(at)
        rows[row].append(sample)
        if free > size:
            bisect.insort(room, (free - size, row))
    return rows


class Visit(NamedTuple):
    """A row in one of its passes, which says what anchors it gets."""

    epoch: int
    samples: list[int]


@dataclass(frozen=True)
class Schedule:
    """Which rows a micro-step of a rank works on, when all states are on the disk (else train/rolling.py)."""

    rows: list[list[int]]
    epochs: int
    batch_size: int
    accumulation: int
    world: int
    seed: int

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.accumulation * self.world

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.rows_per_step)

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def order(self, epoch: int) -> np.ndarray:
        """The rows in this epoch's order; the same on every rank."""
        generator = np.random.Generator(
            np.random.Philox(key=[self.seed, epoch], counter=[0, 1, 0, 0])
        )
        return generator.permutation(len(self.rows))

    def micro_batch(self, step: int, micro: int, rank: int) -> list[Visit]:
        """The rows of an optimizer step counted from 0; missing ones are empty."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self.rows_per_step + (micro * self.world + rank) * self.batch_size
        picked = [
            Visit(epoch, self.rows[r]) for r in self.order(epoch)[first : first + self.batch_size]
        ]
        return picked + [Visit(epoch, [])] * (self.batch_size - len(picked))

    def identity(self) -> list[object]:
        """What a resumed run must have in common with the interrupted one."""
        return [self.rows_per_step, len(self.rows)]

    def done_with(self, step: int) -> int:
        """How many of the first shards no step from `step` on reads, of those that may be deleted: none."""
        return 0

    def reads(self, step: int) -> list[int]:
        """The shards that a step has to wait for: none, all of them are there."""
        return []


@dataclass
class Batch:
    """Packed rows. R rows, L = max_length tokens; `document` is -1 on padding."""

    input_ids: Tensor  # [R, L] int64
    loss_mask: Tensor  # [R, L] uint8
    document: Tensor  # [R, L] int64
    position: Tensor  # [R, L] int64, from 0 in each document
    priority: Tensor  # [R, L] float64, see train.blocks.anchor_priority
    features: Tensor  # [R, L, F] reader's dtype
    last_hidden: Tensor | None  # [R, L, H]
    sample_ids: list[str]

    def to(self, device: torch.device) -> Batch:
        moved = {
            k: v.to(device, non_blocking=True)
            for k, v in vars(self).items()
            if isinstance(v, Tensor)
        }
        return Batch(**{**vars(self), **moved})


def collate(
    rows: Sequence[Sequence[tuple[int, Sample]]],
    epochs: Sequence[int],
    *,
    max_length: int,
    feature_size: int,
    feature_dtype: torch.dtype,
    hidden_size: int | None,
    seed: int,
) -> Batch:
    """Lay samples (with their numbers) into rows of max_length tokens; a sample that does not fit is cut.

    `epochs` has the pass of each row, which chooses its anchors.
    """
    shape = (len(rows), max_length)
    batch = Batch(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.uint8),
        document=torch.full(shape, -1),
        position=torch.zeros(shape, dtype=torch.int64),
        priority=torch.zeros(shape, dtype=torch.float64),
        features=torch.empty(*shape, feature_size, dtype=feature_dtype),
        last_hidden=None
        if hidden_size is None
        else torch.empty(*shape, hidden_size, dtype=feature_dtype),
        sample_ids=[sample.id for row in rows for _, sample in row],
    )
    for r, row in enumerate(rows):
        start = 0
        for document, (number, sample) in enumerate(row):
            size = min(len(sample.input_ids), max_length - start)
            place = (r, slice(start, start + size))
            batch.input_ids[place] = sample.input_ids[:size].long()
            batch.loss_mask[place] = sample.loss_mask[:size]
            batch.document[place] = document
            batch.position[place] = torch.arange(size)
            priority = anchor_priority(seed, epochs[r], number, len(sample.input_ids))
            batch.priority[place] = torch.from_numpy(priority)[:size]
            batch.features[place] = sample.hidden_states[:size]
            if batch.last_hidden is not None:
                assert sample.last_hidden is not None
                batch.last_hidden[place] = sample.last_hidden[:size]
            start += size
        batch.features[r, start:] = 0
        if batch.last_hidden is not None:
            batch.last_hidden[r, start:] = 0
    return batch


class StepDataset(Dataset[list[Batch]]):
    """Item s is the list of this rank's micro-batches of optimizer step s."""

    def __init__(
        self,
        reader: ShardReader | WindowReader,
        schedule: Schedule,
        *,
        rank: int,
        max_length: int,
        last_hidden: bool,
    ) -> None:
        self.reader, self.schedule, self.rank = reader, schedule, rank
        self.max_length, self.last_hidden = max_length, last_hidden

    def __getitem__(self, step: int) -> list[Batch]:
        if isinstance(self.reader, WindowReader):
            self.reader.wait_for(self.schedule.reads(step))
        return [self._micro(step, micro) for micro in range(self.schedule.accumulation)]

    def _micro(self, step: int, micro: int) -> Batch:
        visits = self.schedule.micro_batch(step, micro, self.rank)
        manifest, reader = self.reader.manifest, self.reader
        return collate(
            [
                [(i, s) for i in visit.samples if (s := reader.borrow(i)) is not None]
                for visit in visits
            ],
            [visit.epoch for visit in visits],
            max_length=self.max_length,
            feature_size=len(manifest.target_layer_ids) * manifest.hidden_size,
            feature_dtype=self.reader.dtype,
            hidden_size=manifest.hidden_size if self.last_hidden else None,
            seed=self.schedule.seed,
        )


def step_batches(
    dataset: StepDataset, start: int, stop: int, workers: int
) -> Iterator[list[Batch]]:
    """The micro-batches of optimizer steps start..stop-1, read ahead by `workers` processes (0: in this one)."""
    return iter(
        DataLoader(
            dataset,
            batch_size=None,
            sampler=range(start, stop),
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context="spawn" if workers else None,
        )
    )
