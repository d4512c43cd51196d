"""What the doctor measures with: hits against a loop, what is clearly better, variants that leave the original alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.schema import TargetConfig
from eval.patient import bad_rows
from eval.replay import draft_everywhere
from eval.variants import clearly_better, distance, hits, variant
from extract.head import head_of
from extract.shards import Sample
from extract.target import Target, load_target
from tests.conftest import tiny_drafter
from train.drafter import SLIDING
from train.layout import load_drafter, save_drafter

BLOCK = 4


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target), dtype="float32", device="cpu"))


def sample_of(target: Target, length: int, mask: list[int]) -> Sample:
    ids = torch.randint(5, 290, (length,), generator=torch.Generator().manual_seed(length))
    features, _ = target.forward_taps(ids[None], (1, 3))
    return Sample("a", ids.int(), torch.tensor(mask, dtype=torch.uint8), features[0].clone(), None)


@pytest.mark.parametrize("mask", [[0] * 9 + [1] * 21, [0] * 4 + [1] * 9 + [0] * 5 + [1] * 12])
def test_hits_are_those_of_a_loop_over_anchors_and_slots(target, mask):
    """On an answer that its own drafts were written into, so that some are right and some are right one place beside."""
    drafter, head = tiny_drafter(target, BLOCK).eval(), head_of(target)
    sample = sample_of(target, 30, mask)
    said = torch.cat([x.argmax(-1) for x in draft_everywhere(drafter, head, sample, 0)])
    ids = sample.input_ids.clone()
    for anchor, slot, shift in [(10, 2, 0), (14, 1, 1), (20, 3, -1), (23, 1, 0), (24, 2, 1)]:
        ids[anchor + slot + shift] = said[anchor, slot - 1]
    # the states stay, so drafts change with their anchor's token only
    sample = replace(sample, input_ids=ids)
    said = torch.cat([x.argmax(-1) for x in draft_everywhere(drafter, head, sample, 0)])
    right, first, blocks = {-1: 0, 0: 0, 1: 0}, 0, 0
    for anchor in range(30):
        needed = mask[anchor : anchor + BLOCK + 1]
        if len(needed) < BLOCK + 1 or not all(needed):
            continue
        blocks += 1
        for slot in range(1, BLOCK):
            for shift in right:
                right[shift] += int(said[anchor, slot - 1] == ids[anchor + slot + shift])
        first += int(said[anchor, 0] == ids[anchor + 1])
    found = hits(drafter, head, [sample, sample], (-1, 0, 1))
    assert found.right == {shift: 2 * n for shift, n in right.items()}
    assert (found.first, found.blocks, found.drafts) == (2 * first, 2 * blocks, 6 * blocks)
    assert sum(right.values()) >= 2 and found.independent == 2 * blocks


def test_an_answer_shorter_than_a_block_counts_nothing(target):
    drafter = tiny_drafter(target, BLOCK).eval()
    found = hits(drafter, head_of(target), [sample_of(target, 12, [0] * 9 + [1] * 3)])
    assert found.blocks == found.drafts == 0 and found.accuracy() == found.first_slot == 0.0


def test_better_by_chance_or_by_little_is_not_clearly_better():
    assert clearly_better(0.30, 0.20, 2000)
    assert not clearly_better(0.30, 0.20, 100)  # 1.6 standard errors
    assert not clearly_better(0.62, 0.60, 10**6)  # sure, and no explanation of anything
    assert not clearly_better(0.2, 0.3, 10**6) and not clearly_better(0.0, 0.0, 0)


def test_a_variant_leaves_the_drafter_as_it_is(target):
    drafter, head = tiny_drafter(target, BLOCK).eval(), head_of(target)
    sample = sample_of(target, 40, [0] * 8 + [1] * 32)
    drafts = lambda one: torch.cat([*draft_everywhere(one, head, sample, 8)])  # noqa: E731
    before = drafts(drafter)
    others = [
        variant(drafter, rope={"rope_type": "default", "rope_theta": 3.0}),
        variant(drafter, shape={"causal_full": True}),
        variant(drafter, layer_types=[SLIDING], sliding_window=BLOCK),
    ]
    for other in others:
        assert not torch.allclose(drafts(other), before, atol=1e-3)
    assert torch.equal(drafts(drafter), before)
    assert torch.equal(drafts(variant(drafter)), before)


def test_rows_that_no_target_makes(target):
    sample = sample_of(target, 20, [0] * 8 + [1] * 12)
    taps = (1, 3)
    assert bad_rows(sample, taps) == {}
    ids, states = sample.input_ids.clone(), sample.hidden_states
    states[4, 64:] = 0  # the second tap alone
    states[6, 3] = torch.nan
    states[9] = states[2]
    assert bad_rows(sample, taps) == {
        "NaN or Inf": 1,
        "zero or constant": 1,
        "equal to another token's": 1,
    }
    states[4], states[6] = states[5] + 1, states[5] + 2
    ids[9] = ids[2]  # a run of one token may repeat its states
    assert bad_rows(replace(sample, input_ids=ids), taps) == {}


def test_distance_is_the_median_tokens():
    ours = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1e6, 0.0]])
    theirs = torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, 0.0]])
    assert distance(ours, theirs) == 1.0


def test_a_drafter_in_bfloat16_rotates_with_float32_frequencies(target, tmp_path):
    """As training and engines do: in bfloat16 a frequency of 0.1 would be up to a radian off at position 5,000."""
    drafter = tiny_drafter(target, BLOCK)
    drafter.shape = replace(drafter.shape, num_target_layers=6)
    save_drafter(drafter, drafter.state_dict(), tmp_path, torch.bfloat16)
    again = load_drafter(tmp_path, torch.bfloat16)
    assert again.fc.weight.dtype == torch.bfloat16
    assert torch.equal(again.rotary.inv_freq, drafter.rotary.inv_freq)
