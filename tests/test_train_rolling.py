"""Training on a rolling window: every row as often as it should, never more on the disk than the budget, no deadlock."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import UserError
from extract.plan import shard_name
from extract.window import PlannedShard, Window, WindowPlan, release, released
from train.rolling import RollingSchedule, rolling_schedule

shard_sizes = st.lists(
    st.lists(st.integers(2, 30), min_size=1, max_size=8), min_size=1, max_size=12
)
splits = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))


def plan_of(shards: list[list[int]]) -> WindowPlan:
    planned = [
        PlannedShard(
            ids=tuple(f"{k}-{i}" for i in range(len(lengths))),
            lengths=tuple(lengths),
            supervised=tuple(1 for _ in lengths),
            bytes=10 * sum(lengths),
        )
        for k, lengths in enumerate(shards)
    ]
    return WindowPlan(plan_fingerprint="p", shards=tuple(planned), frequency=(1,))


def schedule_of(shards, epochs, split, gigabytes=1.0, every=2) -> RollingSchedule:
    batch, accumulation, world = split
    return rolling_schedule(
        plan_of(shards), epochs, batch, accumulation, world, 3,
        max_length=32, gigabytes=gigabytes, checkpoint_every=every,
    )  # fmt: skip


def least_gigabytes(shards, epochs, split, every) -> float:
    """The smallest window that is not refused."""
    sizes = [s.bytes for s in plan_of(shards).shards]
    wide = schedule_of(shards, epochs, split, every=every)
    narrow = RollingSchedule(
        wide.rows, epochs, wide.batch_size, wide.accumulation, wide.world, 3, wide.shards, 1
    )
    return narrow.peak_bytes(sizes, every) / 1e9


@given(shard_sizes, st.integers(1, 4), splits, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_read_once_a_pass_whatever_the_split(shards, epochs, split, every):
    batch, accumulation, world = split
    tight = least_gigabytes(shards, epochs, split, every)
    schedule = schedule_of(shards, epochs, split, tight, every)
    together = schedule_of(shards, epochs, (batch * accumulation * world, 1, 1), tight, every)
    seen = []
    for step in range(schedule.total_steps):
        parts = [
            visit
            for micro in range(accumulation)
            for rank in range(world)
            for visit in schedule.micro_batch(step, micro, rank)
        ]
        assert parts == together.micro_batch(step, 0, 0)
        seen += [(i, visit.epoch) for visit in parts for i in visit.samples]
        touched = {i for visit in parts for i in visit.samples}
        starts = [sum(map(len, shards[:k])) for k in range(len(shards) + 1)]
        assert schedule.reads(step) == [
            k for k in range(len(shards)) if touched & set(range(starts[k], starts[k + 1]))
        ]
    count = sum(map(len, shards))
    assert sorted(seen) == [(i, k) for i in range(count) for k in range(epochs)]


@given(shard_sizes, st.integers(1, 4), splits, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_done_with_names_the_shards_that_no_later_step_reads(shards, epochs, split, every):
    schedule = schedule_of(shards, epochs, split, every=every)
    for step in range(schedule.total_steps + 1):
        later = [k for s in range(step, schedule.total_steps) for k in schedule.reads(s)]
        assert schedule.done_with(step) == min(later, default=len(shards))


@given(
    shard_sizes,
    st.integers(1, 4),
    splits,
    st.integers(1, 5),
    st.floats(1, 3),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_neither_side_waits_for_ever_nor_fills_the_disk(shards, epochs, split, every, room, seed):
    """Both sides as loops over real files, interleaved at random, each killed and started again at random."""
    chance = random.Random(seed)
    gigabytes = room * least_gigabytes(shards, epochs, split, every)
    gigabytes = max(gigabytes, max(10 * sum(lengths) for lengths in shards) / 1e9)
    plan = plan_of(shards)
    schedule = schedule_of(shards, epochs, split, gigabytes, every)
    with TemporaryDirectory() as name:
        folder = Path(name)
        window = Window(folder, plan, gigabytes)
        made, step, saved, idle = 0, 0, 0, 0
        while step < schedule.total_steps:
            assert idle < 1000, "deadlock"
            idle += 1
            what = chance.random()
            if what < 0.02:  # extraction is killed: what stands is kept, the rest made again
                made = released(folder, "p")
                while (folder / shard_name(made)).exists():
                    made += 1
            elif what < 0.04:  # training is killed
                step = saved
                release(folder, "p", schedule.done_with(step))
            elif what < 0.5:
                if made < len(shards) and window.has_room(made):
                    (folder / shard_name(made)).write_bytes(bytes(plan.shards[made].bytes))
                    made, idle = made + 1, 0
            elif all((folder / shard_name(k)).exists() for k in schedule.reads(step)):
                step, idle = step + 1, 0
                if step % every == 0 or step == schedule.total_steps:
                    saved = step
                    release(folder, "p", schedule.done_with(step))
            on_disk = sum(f.stat().st_size for f in folder.glob("shard-*"))
            assert on_disk <= gigabytes * 1e9 * (1 + 1e-12)
        assert not list(folder.glob("shard-*")), "all have been read"


def test_a_wide_window_mixes_many_shards_and_a_small_one_is_refused_with_the_size_it_needs():
    shards = [[20] * 6] * 40
    wide = schedule_of(shards, 4, (2, 1, 1), gigabytes=1.0, every=3)
    tight = schedule_of(shards, 4, (2, 1, 1), gigabytes=9 * 1200 / 1e9, every=3)
    assert wide.spread == 40 and tight.spread < 5
    distance = [max(tight.reads(s)) - min(tight.reads(s)) for s in range(tight.total_steps)]
    assert max(distance) < 9
    with pytest.raises(UserError, match="is too small") as caught:
        schedule_of(shards, 4, (2, 1, 1), gigabytes=3 * 1200 / 1e9, every=3)
    needed = float(str(caught.value).split("this run needs ")[1].split(";")[0])
    assert schedule_of(shards, 4, (2, 1, 1), gigabytes=needed * 1.01, every=3).spread >= 1


def test_every_pass_and_seed_has_an_order_of_its_own():
    rows = [[i] for i in range(40)]
    orders = []
    for seed in (1, 2):
        schedule = RollingSchedule(rows, 3, 40, 1, 1, seed, shards=[0] * 40, spread=1)
        for step in range(3):
            visits = schedule.micro_batch(step, 0, 0)
            assert {visit.epoch for visit in visits} == {step}
            orders.append(tuple(i for visit in visits for i in visit.samples))
    assert len(set(orders)) == 6


def test_a_release_is_never_taken_back(tmp_path):
    for k in range(4):
        (tmp_path / shard_name(k)).write_bytes(b"x")
    release(tmp_path, "p", 3)
    release(tmp_path, "p", 1)
    assert released(tmp_path, "p") == 3
    assert released(tmp_path, "another plan") == 0
    assert [f.name for f in tmp_path.glob("shard-*")] == [shard_name(3)]
    (tmp_path / "window.json").write_text("{}")
    with pytest.raises(UserError, match="is damaged; delete it"):
        released(tmp_path, "p")


def test_a_disk_that_holds_the_window_is_large_enough_for_a_restart(tmp_path):
    """What stands already needs no second place: a full window, started again, asks for nothing."""
    window = Window(tmp_path, plan_of([[20] * 6] * 10), gigabytes=4000 / 1e9)
    assert window.yet_to_come(missing=12_000, present=0) == 4000
    assert window.yet_to_come(missing=8_000, present=3600) == 400
    assert window.yet_to_come(missing=100, present=3600) == 100
    assert Window(tmp_path, None, None).yet_to_come(missing=12_000, present=7) == 12_000
