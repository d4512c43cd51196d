"""Anchors and masks against loops that a person can read; FlexAttention against SDPA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from train.blocks import (
    anchor_priority,
    block_targets,
    choose_anchors,
    dense_mask,
    sight,
    slot_inputs,
    sparse_mask,
    valid_anchors,
)
from train.drafter import DraftShape, attend
from train.log import compiled_graphs

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"window": 3},
    "causal": {"window": 3, "causal": True},
}


def block_mask(document, position, anchors, block, **kind):
    rule = sight(document, position, anchors, block, **kind)
    return dense_mask(rule, *sizes(document, anchors, block), CPU)


def sizes(document, anchors, block) -> tuple[int, int, int]:
    slots = anchors.shape[1] * block
    return len(anchors), slots, document.shape[1] + slots


def drawn(mask, document, count, seed):
    priority = np.stack([anchor_priority(seed, 0, r, mask.shape[1]) for r in range(len(mask))])
    return choose_anchors(valid_anchors(mask, document), torch.from_numpy(priority), count)


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


@given(packed_rows(), st.integers(1, 8), st.integers(2, 5), st.integers(0, 5), st.integers(0, 1))
@settings(max_examples=100, deadline=None)
def test_layout_equals_slow_loops(row, count, block, seed, first):
    ids, mask, document, position = row
    rows, length = ids.shape
    valid = valid_anchors(mask, document)
    anchors = drawn(mask, document, count, seed)
    targets, supervised = block_targets(
        ids, mask, document, anchors, DraftShape(block, 49, (0,), 1, sample_from_anchor=first == 0)
    )
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
                at = a + k if first == 1 else a + k + 1
                if k >= first:
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


def test_no_sample_epoch_or_seed_draws_the_numbers_of_another():
    """Not even shifted: a Philox that counts samples where it counts draws gives sample s + 1 those of s, 4 later."""
    draws = [
        anchor_priority(seed, epoch, sample, 300)
        for seed in (0, 1)
        for epoch in (0, 1)
        for sample in range(20)
    ]
    assert len(np.unique(np.concatenate(draws))) == 2 * 2 * 20 * 300


def test_one_valid_anchor_is_used_and_none_is_harmless():
    document = torch.zeros(2, 6, dtype=torch.long)
    mask = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]], dtype=torch.uint8)
    anchors = choose_anchors(
        valid_anchors(mask, document), torch.rand(2, 6, dtype=torch.float64), 3
    )
    assert anchors.tolist() == [[4, -1, -1], [-1, -1, -1]]
    seen = block_mask(document, torch.arange(6).expand(2, 6), anchors, 4)
    assert bool(seen.any(-1).all()), "a slot that sees nothing makes NaN"


@given(packed_rows(), st.integers(1, 6), st.integers(2, 4), st.sampled_from(sorted(KINDS)))
@settings(max_examples=60, deadline=None)
def test_flex_attention_reads_the_rule_as_the_dense_mask_does(row, count, block, kind):
    _, mask, document, position = row
    anchors = drawn(mask, document, count, 0)
    rule = sight(document, position, anchors, block, **KINDS[kind])
    rows, slots, keys = sizes(document, anchors, block)
    traced = create_mask(rule, rows, 1, slots, keys, device="cpu")
    assert torch.equal(traced, dense_mask(rule, rows, slots, keys, CPU))


def packed_batch(seed, device="cpu", rows=2, length=300, count=40):
    """Rows of two documents and padding, as tensors of constant shape: (mask, document, position, anchors)."""
    g = torch.Generator().manual_seed(seed)
    cut = [int(c) for c in torch.randint(60, 200, (rows,), generator=g)]
    document = torch.full((rows, length), -1)
    position = torch.zeros(rows, length, dtype=torch.long)
    for r, c in enumerate(cut):
        for number, (start, end) in enumerate(((0, c), (c, 280))):
            document[r, start:end] = number
            position[r, start:end] = torch.arange(end - start)
    mask = (torch.rand(rows, length, generator=g) < 0.9).byte()
    anchors = drawn(mask, document, count, seed)
    return [x.to(device) for x in (mask, document, position, anchors)]


def test_masks_of_all_steps_are_one_graph():
    """Only the tensors differ from step to step, so the compiler must not start anew (field bug: a graph a step)."""
    counter = CompileCounter()
    compiled = torch.compile(create_block_mask, backend=counter, dynamic=False, fullgraph=True)
    for seed in range(4):
        _, document, position, anchors = packed_batch(seed)
        rule, shape = sight(document, position, anchors, 4), sizes(document, anchors, 4)
        rows, slots, keys = shape
        made = compiled(rule, rows, None, slots, keys, device="cpu")
        expected = sparse_mask(rule, *shape, CPU)
        assert torch.equal(made.to_dense(), expected.to_dense())
    assert counter.frame_count == 1


def test_tiles_that_no_slot_sees_are_skipped():
    """256 anchors over 2048 tokens: the blocks' own part is a band, most of the tiles are empty."""
    document = torch.zeros(1, 2048, dtype=torch.long)
    anchors = torch.arange(0, 2048, 8)[None]
    rule = sight(document, torch.arange(2048)[None], anchors, 8)
    made = sparse_mask(rule, *sizes(document, anchors, 8), CPU)
    assert made.sparsity() > 65  # percent


def attention(kind, device, how):
    """Output and gradients (on CUDA: FlexAttention has none on a CPU) of both kinds of mask, heads in groups."""
    _, document, position, anchors = packed_batch(1, device)
    rule, shape = sight(document, position, anchors, 4, **kind), sizes(document, anchors, 4)
    rows, slots, keys = shape
    g = torch.Generator().manual_seed(0)
    grid = [(rows, heads, n, 16) for heads, n in ((6, slots), (2, keys), (2, keys))]
    on_gpu = device == "cuda"
    tensors = [torch.randn(s, generator=g).to(device).requires_grad_(on_gpu) for s in grid]
    weight = torch.randn(grid[0], generator=g).to(device)
    q, k, v = tensors
    out = attend(q, k, v, how(rule, *shape, document.device))
    return [out, *torch.autograd.grad((out * weight).sum(), tensors)] if on_gpu else [out]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_flex_attention_equals_sdpa(kind, device):
    flex, sdpa = (attention(kind, device, how) for how in (sparse_mask, dense_mask))
    tolerance = 1e-5 if device == "cpu" else 1e-3  # float32 products may be TF32 on CUDA
    for a, b in zip(flex, sdpa, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_attention_on_cuda_compiles_once():
    def step(seed):
        _, document, position, anchors = packed_batch(seed, "cuda")
        rule, shape = sight(document, position, anchors, 4), sizes(document, anchors, 4)
        rows, slots, keys = shape
        sparse = sparse_mask(rule, *shape, document.device)
        q = torch.randn(rows, 6, slots, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn(rows, 2, keys, 64, device="cuda", dtype=torch.bfloat16)
        attend(q, k, k, sparse).sum().backward()
        return compiled_graphs()

    assert len({step(seed) for seed in range(4)}) == 1
