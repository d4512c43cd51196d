"""The order of training when only a window of the states is on the disk: every row `epochs` times, few shards at a time.

Pass k over a row of shard j happens at the time j + spread * (k + u), with u uniform in [0, 1) and drawn anew for every
row and pass; the run goes through all passes by time. So a step mixes rows of about epochs * spread shards, a shard is
needed for about as long, and the passes over a row lie about `spread` shards apart. `spread` is as large as the window
allows (extract/window.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from accelerate import Accelerator

from configs.load import UserError
from extract.manifest import AGAIN
from extract.shards import ShardReader
from extract.waiting import POLL_SECONDS, Notice
from extract.window import (
    WINDOW,
    WindowPlan,
    WindowReader,
    release,
    released,
)
from train.batches import Schedule, Visit, pack
from train.checkpoint import checkpoint_interval
from train.signals import StopSignal

AHEAD = (
    0.25  # the share of the window that is left to extraction to run ahead, where there is so much
)


@dataclass(frozen=True)
class RollingSchedule(Schedule):
    shards: list[int]  # the shard of each row: a row never spans two
    spread: int

    @property
    def total_steps(self) -> int:
        return -(-len(self.rows) * self.epochs // self.rows_per_step)

    @cached_property
    def _visits(self) -> tuple[np.ndarray, np.ndarray]:
        """(pass, row) of every visit, in order; the same on every rank."""
        shard = np.asarray(self.shards)
        times = []
        for k in range(self.epochs):
            key = np.random.Philox(key=[self.seed, k], counter=[0, 1, 0, 0])
            times.append(shard + self.spread * (k + np.random.Generator(key).random(len(shard))))
        order = np.argsort(np.concatenate(times), kind="stable")
        return np.divmod(order, len(shard))

    @cached_property
    def _needed(self) -> tuple[np.ndarray, np.ndarray]:
        """For every step (the last shard that it or an earlier one reads, the first that it or a later one reads)."""
        read = np.asarray(self.shards)[self._visits[1]]
        starts = np.arange(self.total_steps) * self.rows_per_step
        last = np.maximum.accumulate(np.maximum.reduceat(read, starts))
        first = np.minimum.accumulate(np.minimum.reduceat(read, starts)[::-1])[::-1]
        return last, first

    def micro_batch(self, step: int, micro: int, rank: int) -> list[Visit]:
        """The rows of an optimizer step counted from 0; missing ones are empty."""
        start = step * self.rows_per_step + (micro * self.world + rank) * self.batch_size
        passes, rows = self._visits
        picked = slice(start, min(start + self.batch_size, (step + 1) * self.rows_per_step))
        out = [
            Visit(int(k), self.rows[r]) for k, r in zip(passes[picked], rows[picked], strict=True)
        ]
        return out + [Visit(0, [])] * (self.batch_size - len(out))

    def identity(self) -> list[object]:
        return [*super().identity(), self.spread, max(self.shards)]

    def reads(self, step: int) -> list[int]:
        """The shards of a step, over all ranks."""
        rows = self._visits[1][step * self.rows_per_step : (step + 1) * self.rows_per_step]
        return sorted({self.shards[r] for r in rows})

    def done_with(self, step: int) -> int:
        """How many of the first shards no step from `step` on reads."""
        return max(self.shards) + 1 if step >= self.total_steps else int(self._needed[1][step])

    def peak_bytes(self, sizes: Sequence[int], every: int) -> int:
        """The most that has to be on the disk at a time; shards are deleted at checkpoints, `every` steps apart."""
        before = np.concatenate([[0], np.cumsum(sizes)])
        last, first = self._needed
        starts = np.arange(0, self.total_steps, every)
        ends = np.minimum(starts + every, self.total_steps) - 1
        return int((before[last[ends] + 1] - before[first[starts]]).max())


def rolling_schedule(
    plan: WindowPlan,
    epochs: int,
    batch_size: int,
    accumulation: int,
    world: int,
    seed: int,
    *,
    max_length: int,
    gigabytes: float,
    checkpoint_every: int | None,
) -> RollingSchedule:
    """The schedule with the widest spread that fits. UserError when none does."""
    rows, shards, first = [], [], 0
    for number, shard in enumerate(plan.shards):
        packed = pack(shard.lengths, max_length)
        rows += [[first + i for i in row] for row in packed]
        shards += [number] * len(packed)
        first += len(shard.ids)

    def with_spread(spread: int) -> RollingSchedule:
        return RollingSchedule(rows, epochs, batch_size, accumulation, world, seed, shards, spread)

    sizes = [shard.bytes for shard in plan.shards]
    limit = round(gigabytes * 1e9)

    def fits(spread: int, room: float) -> RollingSchedule | None:
        schedule = with_spread(spread)
        every = checkpoint_interval(checkpoint_every, schedule.total_steps)
        return schedule if schedule.peak_bytes(sizes, every) <= room else None

    best = fits(1, limit)
    if best is None:
        every = checkpoint_interval(checkpoint_every, with_spread(1).total_steps)
        least = with_spread(1).peak_bytes(sizes, every)
        raise UserError(
            f"extract.window_gb={gigabytes:g} is too small: with a checkpoint every {every} steps, after which shards "
            f"are deleted, this run needs {1.001 * least / 1e9:.4g}; raise it, or lower train.checkpoint_every or "
            "extract.shard_tokens"
        )
    low, high = 1, len(plan.shards)
    while low < high:  # the widest spread that leaves extraction room to run ahead
        middle = (low + high + 1) // 2
        if schedule := fits(middle, limit * (1 - AHEAD)):
            low, best = middle, schedule
        else:
            high = middle - 1
    return best


class Arrivals:
    """The loop's side of a window: wait for a step's shards, let go of what the last checkpoint makes superfluous.

    Does nothing when all states are on the disk.
    """

    def __init__(
        self,
        reader: ShardReader | WindowReader,
        schedule: Schedule,
        accelerator: Accelerator,
        stop: StopSignal,
        start: int,
    ) -> None:
        """UserError when what the run needs from step `start` on was deleted already."""
        self.reader, self.schedule = reader, schedule
        self.accelerator, self.stop = accelerator, stop
        if isinstance(reader, WindowReader):
            gone = released(reader.folder, reader.plan.plan_fingerprint)
            if gone > (needed := schedule.done_with(start)):
                raise UserError(
                    f"step {start} needs shard {needed} and the first {gone} shards of {reader.folder} were deleted "
                    f"after a later checkpoint; delete {reader.folder / WINDOW}, and {AGAIN}, which makes them anew"
                )
        self.release(start)

    def wait(self, step: int) -> bool:
        """Return when every process sees the shards of this step; False when a signal to stop came first."""
        reader, notice = self.reader, Notice(at_once=False)
        while isinstance(reader, WindowReader):
            missing = [k for k in self.schedule.reads(step) if not reader.has(k)]
            seen = torch.tensor([float(len(missing)), self.stop.requested])
            seen = self.accelerator.reduce(seen.to(self.accelerator.device), "sum")
            if seen[1] > 0:
                return False
            if seen[0] == 0:
                return True
            if self.accelerator.is_main_process:
                notice.say(f"waiting for extract/main.py to make shards {missing}")
            time.sleep(POLL_SECONDS)
        return True

    def release(self, step: int) -> None:
        """Delete what no step from `step` on reads; call it when the checkpoint of `step` is complete."""
        if self.accelerator.is_main_process and isinstance(self.reader, WindowReader):
            stamp = self.reader.plan.plan_fingerprint
            release(self.reader.folder, stamp, self.schedule.done_with(step))
