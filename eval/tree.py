"""The DDTree draft tree: best-first prefixes of one block-diffusion drafter pass.

One pass of the drafter gives, for each slot 1..D after the last accepted token, a marginal
distribution q_d over the vocabulary (D = block_size - 1). DDTree (best-first tree over
block-diffusion marginals) scores a prefix (t_1..t_d) by q_1(t_1) * ... * q_d(t_d) and drafts the
`budget` heaviest non-empty prefixes. A child is never heavier than its parent, so that set is
prefix-closed: it is a tree, hung under the last accepted token (node 0, outside the budget).

The order of prefixes is total, so every tree here is deterministic:

1. heavier first, where a log-weight is the correctly rounded sum (`math.fsum`) of the
   log-marginals, which are normalised in the logits' precision (at least float32): prefixes that
   use the same marginals in another order tie exactly, which they would not if the sum ran left to
   right;
2. then shallower first, which keeps a parent before a child of equal weight;
3. then lexicographic by rank, where a slot ranks its tokens by logit, highest first, and equal
   logits by lowest token id. Rank 0 is the argmax. Low-precision logits do tie, so this matters.

Nodes are stored in that order. It puts parents before children, and it makes the tree of a smaller
budget the leading slice of the tree of a bigger one (for the same logits and top_k).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
        mask = torch.zeros(n, n, dtype=torch.bool, device=self.tokens.device)
        node = torch.arange(n, device=self.tokens.device)
        ancestor = node
        for _ in range(int(self.depths.max()) + 1):
            mask[node, ancestor] = True
            # All rows climb one step. The root is an ancestor of every node, so rows that reached
            # it may stay there.
            ancestor = self.parents[ancestor].clamp(min=0)
        return mask

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
        children = self.children()
        wanted: list[int] = next_tokens.tolist()
        path = [0]
        while (child := children[path[-1]].get(wanted[path[-1]])) is not None:
            path.append(child)
        return path


def build_tree(logits: Tensor, root_token: int, budget: int, *, top_k: int | None = None) -> Tree:
    """The `budget` heaviest prefixes of one drafter pass, in the order the module describes.

    logits: [D, V], any float dtype; row d - 1 is slot d. Temperature, if any, is already applied.
    top_k: keep only ranks 0..top_k - 1 of each slot (weights are not renormalised).
    Fewer nodes come back where fewer prefixes exist. The tensors are on logits' device.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be [D, V], not {list(logits.shape)}")
    if budget < 0:
        raise ValueError(f"budget must be at least 0, not {budget}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    (ranked,) = _rank_slots(logits[None], budget, top_k)
    return _grow(*ranked, root_token, budget, logits.device)


Slots = tuple[
    list[list[int]], list[list[float]]
]  # of one pass: token ids and log-marginals by rank


def _grow(
    slot_tokens: list[list[int]],
    slot_logq: list[list[float]],
    root_token: int,
    budget: int,
    device: torch.device,
) -> Tree:
    """Pop prefixes best first until the budget is spent."""
    tokens, parents, depths, log_weights = [root_token], [-1], [0], [0.0]

    # A heap entry is one prefix that is not in the tree yet: (-log-weight, depth, ranks, parent
    # node). Its first three fields are the module's order; ranks are unique, so the parent is
    # never compared. Each prefix enters once: by its sibling one rank up or, at rank 0, by its
    # parent. Both come before it in the order, so the heap's minimum is always the next prefix of
    # all those left.
    heap: list[tuple[float, int, tuple[int, ...], int]] = []

    def push(ranks: tuple[int, ...], parent: int) -> None:
        depth = len(ranks)
        if depth <= len(slot_logq) and ranks[-1] < len(slot_logq[depth - 1]):
            log_weight = math.fsum(map(list.__getitem__, slot_logq, ranks))
            heapq.heappush(heap, (-log_weight, depth, ranks, parent))

    push((0,), 0)
    while heap and len(tokens) <= budget:
        negative_log_weight, depth, ranks, parent = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(slot_tokens[depth - 1][ranks[-1]])
        parents.append(parent)
        depths.append(depth)
        log_weights.append(-negative_log_weight)
        push((*ranks[:-1], ranks[-1] + 1), parent)
        push((*ranks, 0), node)

    return Tree(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        parents=torch.tensor(parents, dtype=torch.int64, device=device),
        depths=torch.tensor(depths, dtype=torch.int64, device=device),
        log_weights=torch.tensor(log_weights, dtype=torch.float64, device=device),
    )


def _rank_slots(logits: Tensor, budget: int, top_k: int | None) -> list[Slots]:
    """For each pass of [R, D, V] and each slot that a tree of `budget` nodes can reach: its token
    ids and log-marginals by rank.

    How many ranks are enough: a node of depth d whose slot-d token has rank r (from 0) comes after
    its d - 1 ancestors and its r siblings of lower rank, which are r + d - 1 different nodes. It is
    in the tree only if r + d - 1 < budget, so slot d needs ranks 0..budget - d and no slot past
    `budget` is reached. No smaller count will do (budget // d, say): if slots 1..d - 1 are all but
    certain and slot d is flat, the tree is their chain and then budget - d + 1 siblings.
    """
    passes, depth, vocabulary = logits.shape
    rows = logits.detach().reshape(passes * depth, vocabulary)
    most = min(vocabulary, budget, vocabulary if top_k is None else top_k)
    ids, logq = _rank_rows(rows, most, depth)
    out: list[Slots] = []
    for p in range(passes):
        counts = [min(most, budget - d) for d in range(min(depth, budget))]
        slots = range(p * depth, p * depth + len(counts))
        out.append(
            (
                [ids[s][:n] for s, n in zip(slots, counts, strict=True)],
                [logq[s][:n] for s, n in zip(slots, counts, strict=True)],
            )
        )
    return out


def _rank_rows(rows: Tensor, count: int, depth: int) -> tuple[list[list[int]], list[list[float]]]:
    """The `count` highest logits of each row of [N, V], ranked by logit, then by lowest id."""
    exact = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    log_total = exact.logsumexp(-1).to(torch.float64)
    # Not finite for a NaN, a +inf, or nothing but -inf (a lone -inf is a token ruled out).
    bad = (~log_total.isfinite()).nonzero()
    if len(bad):
        raise ValueError(f"slot {int(bad[0]) % depth + 1} has NaN logits or no finite softmax")
    if count <= 0:
        return [[] for _ in rows], [[] for _ in rows]
    # torch.topk promises neither which of several equal logits it keeps nor their order: sort what
    # it gives by id and then, stably, by logit. A row whose next logit ties with its last one may
    # have got the wrong ids, so it is ranked by itself.
    values, ids = rows.topk(min(count + 1, rows.shape[1]))
    crowded = []
    if values.shape[1] > count:
        crowded = (values[:, count] == values[:, count - 1]).nonzero().flatten().tolist()
        values, ids = values[:, :count], ids[:, :count]
    by_id = ids.argsort(dim=1)
    values, ids = values.gather(1, by_id), ids.gather(1, by_id)
    by_logit = values.argsort(dim=1, descending=True, stable=True)
    values, ids = values.gather(1, by_logit), ids.gather(1, by_logit)
    for r in crowded:
        candidates = (rows[r] >= values[r, -1]).nonzero().squeeze(1)
        order = rows[r, candidates].argsort(descending=True, stable=True)
        ids[r] = candidates[order[:count]]
        values[r] = rows[r, ids[r]]
    return ids.tolist(), (values.to(torch.float64) - log_total[:, None]).tolist()


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


def tree_accepted_lengths(logits: Tensor, continuation: Tensor, budgets: Sequence[int]) -> Tensor:
    """Drafted tokens accepted in R independent rounds, at several budgets, with no target model.

    Under greedy decoding the target's own text is known beforehand, so a round accepts the longest
    prefix of that text that is in the tree.

    logits: [R, D, V], one drafter pass a round.
    continuation: int64 [R, D], the target's text after each round's last accepted token; -1 is
    unknown or past the end, and ends the match.
    Returns int64 [R, len(budgets)] on the CPU, each 0..D: for every budget exactly
    len(build_tree(...).walk(...)) - 1.
    """
    if logits.ndim != 3 or continuation.shape != logits.shape[:2]:
        shapes = f"{list(logits.shape)} and {list(continuation.shape)}"
        raise ValueError(f"logits and continuation must be [R, D, V] and [R, D], not {shapes}")
    if any(budget < 0 for budget in budgets):
        raise ValueError(f"budgets must be at least 0, not {list(budgets)}")

    biggest = max(budgets, default=0)
    # [R, D]: the node index at which the continuation's prefix of each length joined the tree. The
    # tree of budget b is nodes 0..b of the biggest, so the prefix is in it where the index <= b.
    joined = torch.full(continuation.shape, biggest + 1, dtype=torch.int64)
    for index, (slots, answer) in enumerate(
        zip(_rank_slots(logits, biggest, None), continuation.tolist(), strict=True)
    ):
        children = _grow(*slots, 0, biggest, torch.device("cpu")).children()
        node = 0
        for offset, token in enumerate(answer):
            child = children[node].get(token)  # no token is -1
            if child is None:
                break
            node = child
            joined[index, offset] = node
    # Parents join before children, so the prefixes in a tree are the shortest ones: count them.
    return (joined[:, :, None] <= torch.tensor(budgets, dtype=torch.int64)).sum(dim=1)
