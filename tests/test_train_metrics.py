"""What the log says of a batch, by hand: sums first, one division, and nothing unscored counts as wrong."""

from __future__ import annotations

import torch

from train.batches import Batch
from train.drafter import DraftShape
from train.log import Window
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
