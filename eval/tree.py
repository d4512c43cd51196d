"""The DDTree draft tree: best-first prefixes of one block-diffusion drafter pass.

One pass of the drafter gives, for each slot 1..D after the last accepted token, a marginal
distribution q_d over the vocabulary (D = block_size - 1). DDTree (best-first tree over
block-diffusion marginals) scores a prefix (t_1..t_d) by q_1(t_1) * ... * q_d(t_d) and drafts the
`budget` heaviest non-empty prefixes. A child is never heavier than its parent, so that set is
prefix-closed: it is a tree, hung under the last accepted token (node 0, outside the budget).

The order of prefixes is total, so every tree here is deterministic:

1. heavier first, where a log-weight is the float64 sum of the log-marginals from slot 1 on, left to
   right, and these are normalised in the logits' precision (at least float32);
2. then shallower first, which keeps a parent before a child of equal weight;
3. then lexicographic by rank, where a slot ranks its tokens by logit, highest first, and equal
   logits by lowest token id. Rank 0 is the argmax. Low-precision logits do tie, so this matters.

Rounding breaks none of this. No log-marginal is above 0, and adding to a float64 is monotone: w + a,
rounded, is at most w for a <= 0, and at most w + b, rounded, for a <= b. So a prefix is preceded by
its parent (no lighter, and shallower) and by its siblings of lower rank (no lighter, and earlier by
rank), whatever was rounded on the way.

Nodes are stored in that order. It puts parents before children, and it makes the tree of a smaller
budget the leading slice of the tree of a bigger one (for the same logits and top_k).

With `keep_chain` the drafter's own chain, rank 0 in every slot, is in the tree whatever it weighs:
its D nodes come first, then the heaviest of all other prefixes in the order above. Parents still
come before children and smaller trees are still leading slices, and no text exists of which the
chain alone would accept more than such a tree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eval.grow import follow, grow, join, mark_ancestors
from eval.rank import Slots, lay_out

# Logits that tree_accepted_lengths lays out at a time: on the host what stays in the cache, elsewhere what fills a GPU.
HOST_SLICE, DEVICE_SLICE = 1 << 20, 1 << 26


@dataclass(frozen=True, eq=False)  # eq=False: comparing tensors field by field has no truth value
class Tree:
    """A draft tree of n nodes; node 0 is the root, and a parent's index is below its child's."""

    tokens: Tensor  # int64 [n]; tokens[0] is the last accepted token
    parents: Tensor  # int64 [n]; parents[0] = -1
    depths: Tensor  # int64 [n]; depths[0] = 0, a node of depth d sits in slot d
    log_weights: Tensor  # float64 [n]; root 0.0

    def ancestor_mask(self) -> Tensor:
        """Bool [n, n]: [i, j] is True where j is i or an ancestor of i (what i may attend to)."""
        n = len(self.tokens)
        mask = np.zeros((n, n), np.bool_)
        mark_ancestors(_host(self.parents), mask)
        device = self.tokens.device
        return torch.from_numpy(mask) if device.type == "cpu" else torch.from_numpy(mask).to(device)

    def children(self) -> list[dict[int, int]]:
        """For each node, its children: token -> node index."""
        children: list[dict[int, int]] = [{} for _ in range(len(self.tokens))]
        edges = zip(self.tokens.tolist(), self.parents.tolist(), strict=True)
        for node, (token, parent) in enumerate(edges):
            if parent >= 0:
                children[parent][token] = node
        return children

    def walk(self, next_tokens: Tensor) -> list[int]:
        """Nodes that greedy verification accepts, in order from the root.

        next_tokens: int64 [n], the target's own next token after each node.
        The result starts with node 0, so len(path) - 1 drafted tokens are accepted, and
        next_tokens[path[-1]] is the bonus token.
        """
        if next_tokens.shape != self.tokens.shape:
            raise ValueError(f"next_tokens is {list(next_tokens.shape)}, not [{len(self.tokens)}]")
        path = np.empty(len(self.tokens), np.int64)
        length = follow(_host(self.tokens), _host(self.parents), _host(next_tokens), path)
        return path[:length].tolist()


def build_tree(
    logits: Tensor,
    root_token: int,
    budget: int,
    *,
    top_k: int | None = None,
    keep_chain: bool = False,
) -> Tree:
    """The `budget` heaviest prefixes of one drafter pass, in the order the module describes.

    logits: [D, V], any float dtype; row d - 1 is slot d. Temperature, if any, is already applied.
    top_k: keep only ranks 0..top_k - 1 of each slot (weights are not renormalised).
    keep_chain: the argmax of every slot is in the tree; the budget must be at least D.
    Fewer nodes come back where fewer prefixes exist. The tensors are on logits' device.
    Raises ValueError for arguments that are none of these, and names a slot whose logits are NaN.

    Two slots over a vocabulary of four, root token 3, the three heaviest prefixes (2), (0), (2, 1):

    >>> logits = torch.tensor([[0.35, 0.05, 0.6, 0.0], [0.1, 0.5, 0.2, 0.2]]).log()
    >>> tree = build_tree(logits, root_token=3, budget=3)
    >>> tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()
    ([3, 2, 0, 1], [-1, 0, 0, 1], [0, 1, 1, 2])
    >>> tree.ancestor_mask().int().tolist()                      # [n, n], what each node may attend to
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    >>> tree.walk(torch.tensor([2, 1, 0, 0]))                    # the target says 2 after the root, then 1
    [0, 1, 3]
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be [D, V], not {list(logits.shape)}")
    if budget < 0:
        raise ValueError(f"budget must be at least 0, not {budget}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    depth, vocabulary = logits.shape
    if keep_chain and budget < depth:
        raise ValueError(f"keep_chain needs a budget of at least the {depth} slots, not {budget}")
    most = min(vocabulary, vocabulary if top_k is None else top_k)
    budget = _possible(budget, depth, most)
    used = min(most, budget)
    slots = lay_out(logits, depth, used, copied=logits.device.type != "cpu")
    ranks = Ranks.unknown(depth, used)
    return grow_tree(
        slots, ranks, root_token, budget, most, keep_chain=keep_chain, device=logits.device
    )


def _possible(budget: int, depth: int, most: int) -> int:
    """The budget, or how many prefixes there are if that is less."""
    prefixes, level = 0, 1
    for _ in range(depth):
        level *= most
        prefixes += level
        if prefixes >= budget:
            return budget
    return prefixes


@dataclass(frozen=True)
class Ranks:
    """The best tokens of each slot by rank, as far as growth has asked for them."""

    tokens: NDArray[np.int64]  # [D, ranks]
    logq: NDArray[np.float64]  # [D, ranks], log-marginals
    known: NDArray[np.int64]  # [D], how many of them are filled in

    @classmethod
    def unknown(cls, depth: int, most: int) -> "Ranks":
        shape = (depth, most)
        return cls(np.empty(shape, np.int64), np.empty(shape), np.zeros(depth, np.int64))


def grow_tree(
    slots: Slots,
    ranks: Ranks,
    root_token: int,
    budget: int,
    most: int,
    *,
    keep_chain: bool,
    device: torch.device,
) -> Tree:
    """build_tree from slots that are laid out and checked; `budget` and `most` are not above what there is."""
    nodes = np.empty((3, budget + 1), np.int64)
    log_weights = np.empty(budget + 1, np.float64)
    grow(
        *slots, ranks.tokens, ranks.logq, ranks.known, 0, root_token,
        budget, most, keep_chain, nodes, log_weights,
    )  # fmt: skip
    packed, weights = torch.from_numpy(nodes), torch.from_numpy(log_weights)
    if device.type != "cpu":
        packed, weights = packed.to(device), weights.to(device)
    tokens, parents, depths = packed.unbind(0)
    return Tree(tokens, parents, depths, weights)


def _host(integers: Tensor) -> NDArray[np.int64]:
    """As an array that compiled code takes: on the host, contiguous, int64."""
    return np.ascontiguousarray(integers.numpy(force=True), np.int64)


def chain_tree(draft_tokens: Tensor, root_token: int) -> Tree:
    """The tree with one branch: node i + 1 is draft_tokens[i], int64 [D], and follows node i.

    It has no marginals to weigh its nodes by, so log_weights is NaN past the root.
    """
    device = draft_tokens.device
    n = len(draft_tokens) + 1
    root = torch.tensor([root_token], dtype=torch.int64, device=device)
    log_weights = torch.full((n,), math.nan, dtype=torch.float64, device=device)
    log_weights[0] = 0.0
    depths = torch.arange(n, device=device)
    return Tree(torch.cat([root, draft_tokens.long()]), depths - 1, depths, log_weights)


def tree_accepted_lengths(
    logits: Tensor, continuation: Tensor, budgets: Sequence[int], *, keep_chain: bool = False
) -> Tensor:
    """Drafted tokens accepted in R independent rounds, at several budgets, with no target model.

    Under greedy decoding the target's own text is known beforehand, so a round accepts the longest
    prefix of that text that is in the tree.

    logits: [R, D, V], one drafter pass a round.
    continuation: int64 [R, D], the target's text after each round's last accepted token; -1 is
    unknown or past the end, and ends the match.
    keep_chain: as in build_tree, for every budget.
    Returns int64 [R, len(budgets)] on the CPU, each 0..D: for every budget exactly
    len(build_tree(...).walk(...)) - 1.
    """
    if logits.ndim != 3 or continuation.shape != logits.shape[:2]:
        shapes = f"{list(logits.shape)} and {list(continuation.shape)}"
        raise ValueError(f"logits and continuation must be [R, D, V] and [R, D], not {shapes}")
    if any(budget < 0 for budget in budgets):
        raise ValueError(f"budgets must be at least 0, not {list(budgets)}")
    rounds, depth, vocabulary = logits.shape
    if keep_chain and any(budget < depth for budget in budgets):
        raise ValueError(
            f"keep_chain needs budgets of at least the {depth} slots, not {list(budgets)}"
        )

    biggest = max(budgets, default=0)
    grown = _possible(biggest, depth, vocabulary)
    # [R, D]: the node index at which the continuation's prefix of each length joined the tree. The
    # tree of budget b is nodes 0..b of the biggest, so the prefix is in it where the index <= b.
    joined = np.full((rounds, depth), biggest + 1, np.int64)
    wanted = _host(continuation)
    on_host = logits.device.type == "cpu"
    step = max(1, (HOST_SLICE if on_host else DEVICE_SLICE) // max(1, depth * vocabulary))
    for start in range(0, rounds, step):
        rows = logits[start : start + step].flatten(0, 1)
        slots = lay_out(rows, depth, min(vocabulary, grown), copied=not on_host)
        part = slice(start, start + step)
        join(*slots, grown, vocabulary, keep_chain, wanted[part], joined[part])
    # Parents join before children, so the prefixes in a tree are the shortest ones: count them.
    columns = torch.tensor(budgets, dtype=torch.int64)
    return (torch.from_numpy(joined)[:, :, None] <= columns).sum(dim=1)
