"""The draft tree with a heap and lists: what eval.tree computes, in a form a person can check."""

import heapq

from torch import Tensor

from eval.rank import lay_out

Node = tuple[int, int, int, float]  # token, parent, depth, log-weight


def log_marginals(logits: Tensor) -> list[list[tuple[float, int]]]:
    """For each slot of [D, V], (log-marginal, token) by rank: highest logit first, then lowest id.

    The normaliser is the product's own, because its last bit decides between prefixes of nearly equal weight. It has a
    test of its own.
    """
    totals = lay_out(logits, len(logits), 0, copied=False).log_total.tolist()
    slots = []
    for row, total in zip(logits.double().tolist(), totals, strict=True):
        ranking = sorted((-logit, token) for token, logit in enumerate(row))
        slots.append([(min(-negative - total, 0.0), token) for negative, token in ranking])
    return slots


def slow_tree(
    logits: Tensor, budget: int, top_k: int | None = None, keep_chain: bool = False
) -> list[Node]:
    """The nodes after the root, in order."""
    slots = [slot[:top_k] for slot in log_marginals(logits)]
    nodes: list[Node] = []
    # One entry is a prefix that is not in the tree yet: the three fields of the order, then the parent's index and
    # log-weight. Ranks are unique, so the last two are never compared.
    heap: list[tuple[float, int, tuple[int, ...], int, float]] = []

    def push(ranks: tuple[int, ...], parent: int, weight: float) -> None:
        depth = len(ranks)
        if depth <= len(slots) and ranks[-1] < len(slots[depth - 1]):
            own = weight + slots[depth - 1][ranks[-1]][0]
            heapq.heappush(heap, (-own, depth, ranks, parent, weight))

    def join(entry: tuple[float, int, tuple[int, ...], int, float], child: bool) -> None:
        negative, depth, ranks, parent, weight = entry
        nodes.append((slots[depth - 1][ranks[-1]][1], parent, depth, -negative))
        push((*ranks[:-1], ranks[-1] + 1), parent, weight)
        if child:
            push((*ranks, 0), len(nodes), -negative)

    if keep_chain:
        weight = 0.0
        for depth, slot in enumerate(slots, start=1):
            entry = (-(weight + slot[0][0]), depth, (0,) * depth, depth - 1, weight)
            join(entry, child=False)
            weight = -entry[0]
    else:
        push((0,), 0, 0.0)
    while heap and len(nodes) < budget:
        join(heapq.heappop(heap), child=True)
    return nodes
