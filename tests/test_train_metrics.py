"""What the log says of a batch, by hand: sums first, one division, and nothing unscored counts as wrong."""

from __future__ import annotations

import time

import pytest
import torch

from train.batches import Batch
from train.drafter import DraftShape
from train.log import Window, compiled_graphs
from train.step import Prepared, step_sums


def prepared(supervised: list[list[bool]]) -> Prepared:
    shape = (1, 8)
    batch = Batch(
        input_ids=torch.zeros(shape, dtype=torch.long),
        loss_mask=torch.ones(shape, dtype=torch.uint8),
        document=torch.zeros(shape, dtype=torch.long),
        position=torch.zeros(shape, dtype=torch.long),
        priority=torch.zeros(shape, dtype=torch.float64),
        features=torch.zeros(1, 8, 2),
        last_hidden=None,
        sample_ids=["a"],
    )
    good = torch.tensor([supervised])
    anchors = torch.tensor([[0 if any(block) else -1 for block in supervised]])
    targets, weights = torch.zeros_like(good, dtype=torch.long), good.float()
    return Prepared(batch, anchors, 1, targets, good, weights, weights.sum())


def line(parts: list[tuple[list[list[bool]], list[list[bool]]]]) -> dict:
    window = Window()
    for supervised, correct in parts:
        part = prepared(supervised)
        window.add(step_sums(torch.tensor(2.0), part, torch.tensor([correct])))
    return window.line(1, 0, 0.1, DraftShape(4, 0, (0,), 1))


ALL = [False, True, True, True]


def test_perfect_blocks_reach_the_block_size():
    out = line([([ALL, ALL], [ALL, ALL])])
    assert out["tau_proxy"] == 4.0 and out["accuracy"] == 1.0
    assert out["accuracy_at_position"] == [1.0, 1.0, 1.0]


def test_runs_are_pooled_before_the_division():
    """Leading runs 3, 1 in one step and 2, 0 in the next: 1.5 drafted tokens a block (field bug F4)."""
    runs = {
        3: ALL,
        2: [False, True, True, False],
        1: [False, True, False, True],
        0: [False, False, True, True],
    }
    out = line([([ALL, ALL], [runs[3], runs[1]]), ([ALL, ALL], [runs[2], runs[0]])])
    assert out["tau_proxy"] == 2.5
    assert out["accuracy_at_position"] == [3 / 4, 3 / 4, 3 / 4]
    assert out["loss"] == 4.0 / 12.0


def test_a_block_cut_by_the_end_of_a_turn_is_short_and_not_wrong():
    cut = [False, True, True, False]
    out = line([([ALL, cut, [False] * 4], [ALL, cut, [False] * 4])])
    assert out["tau_proxy"] == 1 + (3 + 2) / 2  # the unused anchor counts nowhere
    assert out["accuracy"] == 1.0


def test_rates_are_of_the_windows_time_and_the_norm_is_its_last_steps():
    """8 tokens and 6 supervised slots a step; of two seconds half a one went by waiting for data."""
    window = Window()
    for norm in (3.0, 5.0):
        part = prepared([ALL, ALL])
        none_right = torch.zeros_like(part.supervised)
        window.add(step_sums(torch.tensor(2.0), part, none_right), norm)
    window.started, window.data_seconds = time.perf_counter() - 2, 0.5
    out = window.line(7, 3, 0.25, DraftShape(4, 0, (0,), 1))
    near = pytest.approx
    assert out["seconds"] == near(2, rel=0.1) and out["data_wait"] == near(0.25, rel=0.1)
    assert out["tokens_per_second"] == near(16 / 2, rel=0.1) and out["tokens"] == 16
    assert out["slots_per_second"] == near(12 / 2, rel=0.1)
    assert (out["step"], out["epoch"], out["lr"], out["grad_norm"]) == (7, 3, 0.25, 5.0)
    assert 2**26 < out["peak_memory_bytes"] < 2**40


def test_a_graph_more_is_one_more_in_the_log():
    before = compiled_graphs()
    grown = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    for length, graphs in ((3, 1), (3, 1), (4, 2)):
        grown(torch.zeros(length))
        assert compiled_graphs() - before == graphs
