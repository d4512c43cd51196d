"""Packing and schedule: every sample exactly once an epoch, whatever the number of processes; resume by step alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from extract.shards import Sample, ShardReader
from tests.test_extract_shards import store
from train.batches import Batch, Schedule, StepDataset, collate, pack, step_batches
from train.blocks import anchor_priority


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(5, 40))
@settings(max_examples=100, deadline=None)
def test_packing_loses_nothing_and_fits(lengths, room):
    rows = pack(lengths, room)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(min(lengths[i], room) for i in row) <= room for row in rows)
    # no two rows could be one: best fit never opens a row that was not needed
    loads = sorted(sum(min(lengths[i], room) for i in row) for row in rows)
    assert len(loads) < 2 or loads[0] + loads[1] > room
    assert rows == pack(lengths, room)


@given(
    st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3)
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_is_a_partition_and_the_split_does_not_matter(
    rows, batch, accumulation, world, seed
):
    schedule = Schedule([[i] for i in range(rows)], 2, batch, accumulation, world, seed)
    single = Schedule([[i] for i in range(rows)], 2, batch * accumulation * world, 1, 1, seed)
    for epoch in (0, 1):
        seen = []
        for within in range(schedule.steps_per_epoch):
            step = epoch * schedule.steps_per_epoch + within
            parts = [
                row
                for micro in range(accumulation)
                for rank in range(world)
                for row in schedule.micro_batch(step, micro, rank)
            ]
            assert len(parts) == schedule.rows_per_step
            assert {row.epoch for row in parts} == {epoch}
            assert sorted(parts) == sorted(single.micro_batch(step, 0, 0))
            seen += [i for row in parts for i in row.samples]
        assert sorted(seen) == list(range(rows))


def test_epochs_and_seeds_have_orders_of_their_own():
    one, other = (Schedule([[i] for i in range(50)], 2, 1, 1, 1, seed) for seed in (0, 1))
    orders = {tuple(schedule.order(epoch)) for schedule in (one, other) for epoch in (0, 1)}
    assert len(orders) == 4


def sample(number: int, length: int) -> Sample:
    states = torch.arange(length * 6).reshape(length, 6) + 1000.0 * number
    return Sample(
        id=f"s{number}",
        input_ids=torch.arange(length, dtype=torch.int32) + 10 * number,
        loss_mask=(torch.arange(length) >= 2).to(torch.uint8),
        hidden_states=states,
        last_hidden=states[:, :3],
    )


def test_collated_rows_hold_each_sample_whole_and_an_empty_row_weighs_nothing():
    rows = [[(3, sample(3, 4)), (1, sample(1, 5))], [], [(2, sample(2, 20))]]
    batch = collate(
        rows,
        [0, 0, 0],
        max_length=12,
        feature_size=6,
        feature_dtype=torch.float32,
        hidden_size=3,
        seed=0,
    )
    assert batch.document[0].tolist() == [0] * 4 + [1] * 5 + [-1] * 3
    assert batch.position[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 0]
    assert batch.input_ids[0, :9].tolist() == [30, 31, 32, 33, 10, 11, 12, 13, 14]
    assert torch.equal(batch.features[0, 4:9], sample(1, 5).hidden_states)
    assert batch.last_hidden is not None
    assert torch.equal(batch.last_hidden[0, 4:9], sample(1, 5).hidden_states[:, :3])
    assert (batch.document[1] == -1).all() and not batch.loss_mask[1].any()
    assert torch.equal(batch.features[2], sample(2, 20).hidden_states[:12])  # cut, not dropped
    assert batch.sample_ids == ["s3", "s1", "s2"]


def test_anchors_follow_the_sample_and_its_pass_and_not_its_place():
    """Beside whom, in which row or micro-batch it lies does not matter; a cut sample keeps those it has room for."""
    rows = [[(3, sample(3, 4)), (1, sample(1, 5))], [(1, sample(1, 5))], [(2, sample(2, 20))]]
    batch = collate(
        rows, [0, 4, 7], max_length=12, feature_size=6, feature_dtype=torch.float32, hidden_size=None, seed=5
    )  # fmt: skip
    drawn = [(0, 0, 4, (0, 3)), (0, 4, 9, (0, 1)), (1, 0, 5, (4, 1)), (2, 0, 12, (7, 2))]
    for row, start, end, (epoch, number) in drawn:
        wanted = anchor_priority(5, epoch, number, 20)[: end - start]
        assert batch.priority[row, start:end].tolist() == wanted.tolist()
        others = [(4, number), (epoch, number + 1), (epoch, row)]
        for other in set(others) - {(epoch, number)}:
            assert anchor_priority(5, *other, 20)[: end - start].tolist() != wanted.tolist()


def test_padding_is_zero_whatever_the_memory_held(monkeypatch):
    """What is masked still goes through the products of attention, where one NaN of old memory would spoil the row."""
    full = torch.full
    monkeypatch.setattr("torch.empty", lambda *size, dtype: full(size, torch.nan, dtype=dtype))
    rows = [[(3, sample(3, 4))], []]
    batch = collate(
        rows, [0, 0], max_length=9, feature_size=6, feature_dtype=torch.float32, hidden_size=3, seed=0
    )  # fmt: skip
    assert batch.last_hidden is not None
    for states, whole in ((batch.features, 4 * 6), (batch.last_hidden, 4 * 3)):
        assert states.isfinite().all() and states.count_nonzero() >= whole - 1
        assert not states[0, 4:].any() and not states[1].any()


def values(batch: Batch) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(batch).items()}


@pytest.mark.slow
def test_reading_ahead_in_other_processes_and_going_on_later_change_nothing(tmp_path: Path):
    reader = ShardReader(store(tmp_path / "states"))
    schedule = Schedule(pack(reader.lengths, 12), 6, 1, 2, 2, 7)
    data = StepDataset(reader, schedule, rank=1, max_length=12, last_hidden=False)

    def read(start: int, workers: int) -> list[list[dict[str, Any]]]:
        steps = step_batches(data, start, schedule.total_steps, workers)
        return [[values(batch) for batch in step] for step in steps]

    here = read(0, workers=0)
    assert len(here) == schedule.total_steps == 6
    assert not any(one in here[:i] for i, one in enumerate(here))
    assert read(0, workers=2) == here and read(2, workers=2) == here[2:]
