"""The draft tree against enumeration of every prefix, and against loops a person can read."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eval.rank import Slots, lay_out
from eval.tree import Ranks, Tree, build_tree, chain_tree, grow_tree, tree_accepted_lengths
from tests.slow_tree import Node, log_marginals, slow_tree

ROOT = 7
few = settings(max_examples=60, deadline=None)

# Whole numbers tie often, also across slots; the other floats hardly ever do.
GRID = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0])
FREE = st.floats(-8.0, 8.0, allow_nan=False, width=32)


@st.composite
def drafter_passes(draw: st.DrawFn) -> Tensor:
    """Logits [D, V] with D and V up to 4: at most 340 prefixes. Rows may repeat."""
    depth, vocabulary = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    value = draw(st.sampled_from([GRID, FREE]))
    row = st.lists(value, min_size=vocabulary, max_size=vocabulary)
    rows = draw(st.lists(row, min_size=1, max_size=depth))
    picks = draw(st.lists(st.sampled_from(rows), min_size=depth, max_size=depth))
    return torch.tensor(picks, dtype=torch.float32)


def heaviest_prefixes(
    logits: Tensor, budget: int, top_k: int | None = None, keep_chain: bool = False
) -> list[list[int]]:
    """All prefixes, sorted by the stated order: the definition, with no search."""
    slots = log_marginals(logits)
    prefixes = []
    for length in range(1, len(slots) + 1):
        for ranks in itertools.product(range(min(len(slots[0]), top_k or 99)), repeat=length):
            weight = 0.0
            for slot, rank in enumerate(ranks):
                weight += slots[slot][rank][0]
            prefix = [slots[slot][rank][1] for slot, rank in enumerate(ranks)]
            first = keep_chain and not any(ranks)
            # The chain's own order is by length.
            prefixes.append((not first, 0.0 if first else -weight, length, ranks, prefix))
    return [prefix for *_, prefix in sorted(prefixes)[:budget]]


def prefixes_of(tree: Tree) -> list[list[int]]:
    """The prefix each drafted node stands for, by climbing to the root."""
    prefixes = []
    for node in range(1, len(tree.tokens)):
        prefix: list[int] = []
        while node != 0:
            prefix.insert(0, int(tree.tokens[node]))
            node = int(tree.parents[node])
        prefixes.append(prefix)
    return prefixes


def nodes_of(tree: Tree) -> list[Node]:
    fields = (tree.tokens, tree.parents, tree.depths, tree.log_weights)
    return list(zip(*(field[1:].tolist() for field in fields), strict=True))


@few
@given(drafter_passes(), st.integers(0, 400), st.none() | st.integers(1, 6), st.booleans())
def test_tree_is_the_heaviest_prefixes_in_order(
    logits: Tensor, budget: int, top_k: int | None, keep_chain: bool
) -> None:
    budget = max(budget, len(logits) if keep_chain else 0)
    tree = build_tree(logits, ROOT, budget, top_k=top_k, keep_chain=keep_chain)
    assert prefixes_of(tree) == heaviest_prefixes(logits, budget, top_k, keep_chain)


@few
@given(drafter_passes(), st.integers(0, 40), st.booleans())
def test_small_trees_are_the_heaviest_prefixes_in_order(
    logits: Tensor, budget: int, keep_chain: bool
) -> None:
    """Small budgets cut inside a slot and inside a tie, which a saturated tree never does."""
    budget += len(logits) if keep_chain else 0
    tree = build_tree(logits, ROOT, budget, keep_chain=keep_chain)
    assert prefixes_of(tree) == heaviest_prefixes(logits, budget, keep_chain=keep_chain)


@pytest.mark.parametrize("keep_chain", [False, True])
@pytest.mark.parametrize("scale", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("vocabulary", [40, 1024, 5001])
def test_tree_is_what_the_slow_one_says(vocabulary: int, scale: float, keep_chain: bool) -> None:
    """Many slots and blocks, a block that is not full, and bfloat16, where most ranks are tied."""
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * scale
    logits[:, 3::7] = -math.inf
    logits[4] = logits[5]
    for rows in (logits, logits.bfloat16()):
        tree = build_tree(rows, ROOT, 200, keep_chain=keep_chain)
        assert nodes_of(tree) == slow_tree(rows, 200, keep_chain=keep_chain)


@pytest.mark.slow  # a second dtype to compile for
def test_float64_logits_keep_their_order() -> None:
    logits = torch.tensor([[0.0, 1e-12, -1.0, 2e-12]], dtype=torch.float64)
    assert build_tree(logits, ROOT, 4).tokens[1:].tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [1, 7, 60])
def test_blocks_copied_from_a_device_grow_the_same_tree(budget: int, dtype: torch.dtype) -> None:
    """Only blocks with a rank that the budget can reach are copied; ties must choose the same ones."""
    logits = torch.randn(4, 1003, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1] = 0.5

    def grown(slots: Slots) -> list[Node]:
        tree = grow_tree(
            slots, Ranks.unknown(4, budget), ROOT, budget, 1003,
            keep_chain=False, device=torch.device("cpu"),
        )  # fmt: skip
        return nodes_of(tree)

    copied = lay_out(logits, 4, budget, copied=True)
    assert copied.logits.shape[1] == min(budget, -(-1003 // 8))
    assert grown(copied) == grown(lay_out(logits, 4, budget, copied=False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tree_on_a_gpu_is_the_tree_on_the_host() -> None:
    logits = torch.randn(15, 3000, generator=torch.Generator().manual_seed(0)) * 4
    here, there = build_tree(logits, ROOT, 100), build_tree(logits.cuda(), ROOT, 100)
    assert there.tokens.is_cuda and there.ancestor_mask().is_cuda
    for field in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(here, field), getattr(there, field).cpu())


@pytest.mark.parametrize("shift", [0.0, 45.0, 300.0, -45.0, -300.0])
def test_normaliser_is_the_log_sum_exp(shift: float) -> None:
    """Also where exp overflows or underflows in float32."""
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(0)) * 4 + shift
    totals = torch.from_numpy(lay_out(logits, 6, 9, copied=False).log_total)
    torch.testing.assert_close(totals, logits.double().logsumexp(1), rtol=2e-7, atol=1e-6)


def test_normaliser_of_a_slot_does_not_depend_on_its_neighbours() -> None:
    """Or replay, which ranks many passes at once, would weigh near-ties differently from build_tree."""
    logits = torch.randn(40, 4000, generator=torch.Generator().manual_seed(0)) * 3
    logits[7] += 400  # takes the way around overflow
    together = lay_out(logits, 5, 9, copied=False).log_total
    alone = [lay_out(logits[i : i + 5], 5, 9, copied=False).log_total for i in range(0, 40, 5)]
    assert together.tolist() == np.concatenate(alone).tolist()


@few
@given(drafter_passes(), st.integers(0, 100))
def test_node_fields_describe_one_rooted_tree(logits: Tensor, budget: int) -> None:
    tree = build_tree(logits, ROOT, budget)
    assert (int(tree.tokens[0]), int(tree.parents[0]), int(tree.depths[0])) == (ROOT, -1, 0)
    assert float(tree.log_weights[0]) == 0.0
    marginals = logits.double().softmax(-1)
    for node, prefix in enumerate(prefixes_of(tree), start=1):
        parent = int(tree.parents[node])
        assert 0 <= parent < node  # prefix-closed and topological
        assert int(tree.depths[node]) == len(prefix) == int(tree.depths[parent]) + 1
        weight = math.prod(float(marginals[slot, token]) for slot, token in enumerate(prefix))
        assert math.exp(float(tree.log_weights[node])) == pytest.approx(
            weight, rel=1e-5
        )  # a float32 normaliser
        assert tree.log_weights[node] <= tree.log_weights[parent]
    assert (tree.log_weights.diff() <= 0).all()  # best first
    assert len({tuple(prefix) for prefix in prefixes_of(tree)}) == len(tree.tokens) - 1


@few
@given(drafter_passes(), st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_smaller_budget_is_the_leading_slice(
    logits: Tensor, small: int, extra: int, keep_chain: bool
) -> None:
    small += len(logits) if keep_chain else 0
    tree, bigger = (
        build_tree(logits, ROOT, budget, keep_chain=keep_chain) for budget in (small, small + extra)
    )
    n = len(tree.tokens)
    for field in ("tokens", "parents", "depths", "log_weights"):
        assert torch.equal(getattr(tree, field), getattr(bigger, field)[:n])


def test_budgets_at_the_edges() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    assert prefixes_of(build_tree(logits, ROOT, 0)) == []
    assert prefixes_of(build_tree(logits, ROOT, 1)) == [[1]]
    assert len(build_tree(logits, ROOT, 12).tokens) == 1 + 3 + 9
    everything = build_tree(logits, ROOT, 10_000)
    assert len(everything.tokens) == 1 + 3 + 9
    clipped = build_tree(logits, ROOT, 10_000, top_k=99)
    assert torch.equal(clipped.tokens, everything.tokens)
    assert len(build_tree(logits, ROOT, 10_000, top_k=2).tokens) == 1 + 2 + 4


def test_confident_drafter_gets_a_chain_at_budget_d() -> None:
    logits = torch.zeros(5, 9)
    logits[torch.arange(5), torch.tensor([4, 0, 8, 8, 2])] = 20.0
    assert prefixes_of(build_tree(logits, ROOT, 5))[-1] == [4, 0, 8, 8, 2]


def test_last_slot_takes_every_node_the_chain_leaves() -> None:
    """Certain, certain, flat: the deepest slot needs budget - 2 ranks, and gets them."""
    logits = torch.zeros(3, 50)
    logits[:2, 5] = 100.0
    prefixes = prefixes_of(build_tree(logits, ROOT, 30))
    assert prefixes == [[5], [5, 5]] + [[5, 5, token] for token in range(28)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_rank_by_lowest_token_id(dtype: torch.dtype) -> None:
    """At a real vocabulary size, where torch.topk picks and orders ties as it likes."""
    logits = torch.zeros(1, 5000, dtype=dtype)
    assert prefixes_of(build_tree(logits, ROOT, 20)) == [[token] for token in range(20)]
    logits[0, [4321, 77, 900]] = 1.0
    expected = [77, 900, 4321, 0, 1, 2]
    assert build_tree(logits, ROOT, 6).tokens[1:].tolist() == expected


def test_equal_weight_goes_to_the_shallower_prefix() -> None:
    """A sure slot has marginal 1, so parent and child tie: [1] comes before its child [1, 0]."""
    logits = torch.tensor([[1.0, 1.0], [0.0, -math.inf]])
    assert prefixes_of(build_tree(logits, ROOT, 4)) == [[0], [1], [0, 0], [1, 0]]


@few
@given(drafter_passes())
def test_top_1_tree_is_the_chain_of_argmaxes(logits: Tensor) -> None:
    argmaxes = [row.index(max(row)) for row in logits.tolist()]  # the first of equals
    chain = chain_tree(torch.tensor(argmaxes), ROOT)
    tree = build_tree(logits, ROOT, 99, top_k=1)
    assert chain.tokens.tolist() == [ROOT, *argmaxes]
    assert chain.parents.tolist() == list(range(-1, len(argmaxes)))
    for field in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(chain, field), getattr(tree, field))
    shorter = build_tree(logits, ROOT, 2, top_k=1)
    assert torch.equal(shorter.tokens, chain.tokens[:3])


def test_chain_claims_no_weights() -> None:
    chain = chain_tree(torch.tensor([3, 1]), ROOT)
    assert chain.log_weights.dtype == torch.float64
    assert float(chain.log_weights[0]) == 0.0
    assert chain.log_weights[1:].isnan().all()


@few
@given(drafter_passes(), st.integers(0, 30))
def test_ancestor_mask_is_self_and_ancestors(logits: Tensor, budget: int) -> None:
    tree = build_tree(logits, ROOT, budget)
    n = len(tree.tokens)
    expected = torch.zeros(n, n, dtype=torch.bool)
    for node in range(n):
        ancestor = node
        while ancestor != -1:
            expected[node, ancestor] = True
            ancestor = int(tree.parents[ancestor])
    assert torch.equal(tree.ancestor_mask(), expected)


@few
@given(drafter_passes(), st.integers(0, 60), st.data())
def test_walk_follows_the_target_while_it_can(
    logits: Tensor, budget: int, data: st.DataObject
) -> None:
    tree = build_tree(logits, ROOT, budget)
    n = len(tree.tokens)
    # Rank 0 and 1 tokens, so that many walks get past the first slot; 9 is in no tree.
    token = st.sampled_from([0, 0, 1, 1, 9])
    next_tokens = torch.tensor(data.draw(st.lists(token, min_size=n, max_size=n)))
    expected = [0]
    found = True
    while found:
        found = False
        here = expected[-1]
        for node in range(n):
            if int(tree.parents[node]) == here and tree.tokens[node] == next_tokens[here]:
                expected.append(node)
                found = True
                break
    assert tree.walk(next_tokens) == expected


def test_walk_reads_each_node_s_own_next_token() -> None:
    chain = chain_tree(torch.tensor([3, 1, 4]), ROOT)
    assert chain.walk(torch.tensor([3, 1, 4, 5])) == [0, 1, 2, 3]  # bonus token 5
    assert chain.walk(torch.tensor([3, 2, 4, 5])) == [0, 1]  # bonus token 2
    assert chain.walk(torch.tensor([ROOT, 1, 4, 5])) == [0]  # the root's own token is no child
    with pytest.raises(ValueError, match="next_tokens"):
        chain.walk(torch.tensor([3, 1, 4]))


@few
@given(
    st.lists(drafter_passes(), min_size=1, max_size=3),
    st.lists(st.integers(0, 60), max_size=4),
    st.booleans(),
    st.data(),
)
def test_replay_accepts_what_building_and_walking_accepts(
    passes: list[Tensor], budgets: list[int], keep_chain: bool, data: st.DataObject
) -> None:
    logits = torch.stack([p for p in passes if p.shape == passes[0].shape])
    budgets = [budget + keep_chain * logits.shape[1] for budget in budgets]
    rounds, depth, vocabulary = logits.shape
    answer = st.lists(st.integers(-1, vocabulary - 1), min_size=depth, max_size=depth)
    continuation = torch.tensor(data.draw(st.lists(answer, min_size=rounds, max_size=rounds)))
    accepted = tree_accepted_lengths(logits, continuation, budgets, keep_chain=keep_chain)
    assert accepted.shape == (rounds, len(budgets))
    for index in range(rounds):
        # The target's next token after a node at depth d on the answer's path; -2 is never met.
        answer_then_end = torch.cat([continuation[index], torch.tensor([-2])])
        for column, budget in enumerate(budgets):
            tree = build_tree(logits[index], ROOT, budget, keep_chain=keep_chain)
            path = tree.walk(answer_then_end[tree.depths])
            assert int(accepted[index, column]) == len(path) - 1


@few
@given(drafter_passes(), st.integers(0, 20), st.data())
def test_a_tree_that_keeps_the_chain_accepts_what_the_chain_accepts(
    logits: Tensor, extra: int, data: st.DataObject
) -> None:
    depth, vocabulary = logits.shape
    answer = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=depth, max_size=depth))
    if data.draw(st.booleans()):  # most answers leave the chain at once
        answer[:-1] = logits.argmax(-1)[:-1].tolist()
    wanted = torch.tensor([*answer, -2])
    chain = chain_tree(logits.argmax(-1), ROOT)
    tree = build_tree(logits, ROOT, depth + extra, keep_chain=True)
    assert torch.equal(tree.tokens[: depth + 1], chain.tokens)
    assert len(chain.walk(wanted)) <= len(tree.walk(wanted[tree.depths]))


def test_keep_chain_changes_a_tree_that_would_leave_the_chain() -> None:
    """Two flat slots: the four heaviest prefixes are all of depth 1, and the chain needs depth 2."""
    logits = torch.zeros(2, 6)
    assert prefixes_of(build_tree(logits, ROOT, 4)) == [[0], [1], [2], [3]]
    kept = build_tree(logits, ROOT, 4, keep_chain=True)
    assert prefixes_of(kept) == [[0], [0, 0], [1], [2]]
    answer = torch.tensor([[0, 0]])
    assert tree_accepted_lengths(logits[None], answer, [4]).tolist() == [[1]]
    assert tree_accepted_lengths(logits[None], answer, [4], keep_chain=True).tolist() == [[2]]


def test_replay_counts_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0, -9.0], [1.0, 0.0, -9.0]])  # best first: 0, 00, 01, 1, 10, 11
    answers = torch.tensor([[0, 1], [1, 1], [0, -1], [-1, 0], [2, 2]])
    accepted = tree_accepted_lengths(logits.expand(5, 2, 3), answers, [0, 1, 2, 3, 4, 6, 99])
    assert accepted.tolist() == [
        [0, 1, 1, 2, 2, 2, 2],
        [0, 0, 0, 0, 1, 2, 2],
        [0, 1, 1, 1, 1, 1, 1],  # the answer ends after one token
        [0, 0, 0, 0, 0, 0, 0],  # nothing after a -1 counts
        [0, 0, 0, 0, 0, 0, 2],
    ]


def test_ruled_out_tokens_come_last() -> None:
    """-inf is a mask, not an error: such prefixes have weight 0, after all others."""
    logits = torch.tensor([[-math.inf, 0.0, 1.0]])
    tree = build_tree(logits, ROOT, 9)
    assert prefixes_of(tree) == [[2], [1], [0]]
    assert float(tree.log_weights[-1]) == -math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("budget", [0, 1, 50])
def test_nan_logits_are_refused_by_slot(bad: float, budget: int) -> None:
    """Also in a slot that the budget cannot reach: a drafter that emits NaN is broken."""
    logits = torch.zeros(4, 6)
    logits[2, 5] = bad
    with pytest.raises(ValueError, match="slot 3"):
        build_tree(logits, ROOT, budget)
    with pytest.raises(ValueError, match="slot 3"):
        tree_accepted_lengths(logits[None], torch.zeros(1, 4, dtype=torch.int64), [budget])


def test_a_slot_with_every_token_ruled_out_is_refused() -> None:
    with pytest.raises(ValueError, match="slot 1"):
        build_tree(torch.full((2, 3), -math.inf), ROOT, 4)


def test_bad_arguments_are_refused() -> None:
    logits = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="budget"):
        build_tree(logits, ROOT, -1)
    with pytest.raises(ValueError, match="top_k"):
        build_tree(logits, ROOT, 4, top_k=0)
    with pytest.raises(ValueError, match="logits"):
        build_tree(logits[0], ROOT, 4)
    with pytest.raises(ValueError, match="2 slots, not 1"):
        build_tree(logits, ROOT, 1, keep_chain=True)
    with pytest.raises(ValueError, match="2 slots, not"):
        answer = torch.zeros(1, 2, dtype=torch.int64)
        tree_accepted_lengths(logits[None], answer, [4, 1], keep_chain=True)
    with pytest.raises(ValueError, match="continuation"):
        tree_accepted_lengths(logits[None], torch.zeros(1, 3, dtype=torch.int64), [4])
    with pytest.raises(ValueError, match="budgets"):
        tree_accepted_lengths(logits[None], torch.zeros(1, 2, dtype=torch.int64), [4, -1])
