"""Anchors and masks against loops that a person can read."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.blocks import (
    anchor_priority,
    block_mask,
    block_targets,
    choose_anchors,
    slot_inputs,
    valid_anchors,
)


@st.composite
def packed_rows(draw):
    """A few rows of documents with random masks, padded to one length."""
    rows = draw(st.integers(1, 3))
    length = draw(st.integers(4, 24))
    ids = torch.randint(
        0, 50, (rows, length), generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    mask = torch.zeros(rows, length, dtype=torch.uint8)
    document = torch.full((rows, length), -1)
    position = torch.zeros(rows, length, dtype=torch.long)
    for r in range(rows):
        start = 0
        for d, size in enumerate(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))):
            size = min(size, length - start)
            if size <= 0:
                break
            document[r, start : start + size] = d
            position[r, start : start + size] = torch.arange(size)
            bits = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
            mask[r, start : start + size] = torch.tensor(bits, dtype=torch.uint8)
            start += size
    return ids, mask, document, position


@given(packed_rows(), st.integers(1, 8), st.integers(2, 5), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_layout_equals_slow_loops(row, count, block, seed):
    ids, mask, document, position = row
    rows, length = ids.shape
    priority = torch.from_numpy(
        np.stack([anchor_priority(seed, 0, r, length) for r in range(rows)])
    )
    valid = valid_anchors(mask, document)
    anchors = choose_anchors(valid, priority, count)
    targets, supervised = block_targets(ids, mask, document, anchors, block)
    tokens, positions = slot_inputs(ids, position, anchors, block, mask_token_id=49)
    window, causal = 3, True
    full = block_mask(document, position, anchors, block)
    sliding = block_mask(document, position, anchors, block, window=window, causal=causal)

    for r in range(rows):
        good = [
            a
            for a in range(length - 1)
            if mask[r, a]
            and mask[r, a + 1]
            and document[r, a] == document[r, a + 1]
            and document[r, a] >= 0
        ]
        chosen = [a for a in anchors[r].tolist() if a >= 0]
        assert [bool(v) for v in valid[r]] == [a in good for a in range(length)]
        assert chosen == sorted(set(chosen)) and set(chosen) <= set(good)
        assert len(chosen) == min(count, len(good))
        assert anchors[r].tolist()[len(chosen) :] == [-1] * (count - len(chosen))
        for j, a in enumerate(anchors[r].tolist()):
            ended = a < 0
            for k in range(block):
                s = j * block + k
                at = a + k
                if k > 0:
                    ended = (
                        ended
                        or at >= length
                        or document[r, at] != document[r, a]
                        or not mask[r, at]
                    )
                    assert bool(supervised[r, j, k]) == (not ended)
                    if not ended:
                        assert targets[r, j, k] == ids[r, at]
                else:
                    assert not supervised[r, j, 0]
                if a >= 0:
                    assert tokens[r, s] == (ids[r, a] if k == 0 else 49)
                    assert positions[r, s] == position[r, a] + k
                for i in range(length):
                    sees = a >= 0 and i < a and bool(document[r, i] == document[r, a])
                    assert bool(full[r, 0, s, i]) == sees
                    near = sees and int(position[r, a]) + k - int(position[r, i]) < window
                    assert bool(sliding[r, 0, s, i]) == near
                for other in range(count * block):
                    own = other // block == j
                    assert bool(full[r, 0, s, length + other]) == own
                    assert bool(sliding[r, 0, s, length + other]) == (own and other <= s)


def test_anchors_are_redrawn_each_epoch_and_reproducible():
    draw = [anchor_priority(3, epoch, 7, 20).tolist() for epoch in (0, 1, 0)]
    assert draw[0] == draw[2] != draw[1]
    assert anchor_priority(3, 0, 8, 20).tolist() != draw[0]
    # a longer sample starts with the same numbers: cutting a sample does not move its anchors
    assert anchor_priority(3, 0, 7, 40).tolist()[:20] == draw[0]


def test_one_valid_anchor_is_used_and_none_is_harmless():
    document = torch.zeros(2, 6, dtype=torch.long)
    mask = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]], dtype=torch.uint8)
    anchors = choose_anchors(
        valid_anchors(mask, document), torch.rand(2, 6, dtype=torch.float64), 3
    )
    assert anchors.tolist() == [[4, -1, -1], [-1, -1, -1]]
    seen = block_mask(document, torch.arange(6).expand(2, 6), anchors, 4)
    assert bool(seen.any(-1).all()), "a slot that sees nothing makes NaN"
