"""The compiled core of the draft tree: ranks of a slot on demand, best-first growth, mask and walk, on NumPy arrays.

Growth asks a slot for its next rank only when it needs it, and the answer comes from a tournament: a slot's logits lie
in blocks, a heap orders the blocks by the best token that is left in each, and taking that token rescans its block
alone. So a slot that contributes three tokens costs three short scans, whatever the vocabulary and the budget.

numba compiles a function at its first call with a dtype (seconds) and keeps the result next to this file or, where
that is not writable, in the user's cache folder (or NUMBA_CACHE_DIR).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Columns of a prefix; NODE is its index in the tree, once it is there.
DEPTH, PARENT, RANK, NODE = range(4)
# Blocks that share an entry in a slot's list of maxima.
GROUP = 32


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as machine code, from the disk wherever there is a place to keep it."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # nowhere to write: compile in every process
        return numba.njit(nogil=True)(function)


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for use in compiled ones only, which spares the time to compile its way in from Python."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**options)(function)


@helper
def _first_highest(values, row, start, stop):
    """Where in values[row, start:stop] the highest number is, the first of equals; NaN is no number."""
    at = start
    for i in range(start + 1, stop):
        if values[row, i] > values[row, at] or values[row, at] != values[row, at]:
            at = i
    return at


@helper
def _take(logits, best, place, tops, row, slot):
    """The next token of a slot by logit, then lowest id: (its block, its place in there).

    best [N, blocks]: the highest logit left in each block of logits [N, blocks, B], NaN when none is left. place
    [slots, blocks]: where in the block that is, -1 if not looked up. tops [slots, groups]: the highest of each GROUP
    of `best`. There must be a token left.
    """
    group = _first_highest(tops, slot, 0, tops.shape[1])
    start, stop = group * GROUP, min(group * GROUP + GROUP, best.shape[1])
    block = _first_highest(best, row, start, stop)
    value, at = best[row, block], place[slot, block]
    if at < 0:
        at = 0
        while logits[row, block, at] != value:
            at += 1
    follower, highest = -1, value
    for i in range(logits.shape[2]):
        x = logits[row, block, i]
        if (x < value or (x == value and i > at)) and (follower < 0 or x > highest):
            follower, highest = i, x
    best[row, block] = highest if follower >= 0 else np.nan
    place[slot, block] = follower
    tops[slot, group] = best[row, _first_highest(best, row, start, stop)]
    return block, at


@helper
def _tie_before(a, b, prefixes):
    """Whether prefix a comes before prefix b of equal weight in the order that eval.tree describes."""
    if prefixes[a, DEPTH] != prefixes[b, DEPTH]:
        return prefixes[a, DEPTH] < prefixes[b, DEPTH]
    while prefixes[a, PARENT] != prefixes[b, PARENT]:  # up to where they part
        a, b = prefixes[a, PARENT], prefixes[b, PARENT]
    return prefixes[a, RANK] < prefixes[b, RANK]


@helper
def _push(keys, heap, size, key, new, prefixes):
    """Add prefix `new` of weight `key` to the frontier: a heap of weights and the prefixes that they belong to."""
    at = size
    while at > 0:
        up = (at - 1) // 2
        if key < keys[up, 0] or (key == keys[up, 0] and _tie_before(heap[up, 0], new, prefixes)):
            break
        keys[at, 0], heap[at, 0] = keys[up, 0], heap[up, 0]
        at = up
    keys[at, 0], heap[at, 0] = key, new


@helper
def _replace(keys, heap, size, key, new, prefixes):
    """Put prefix `new` of weight `key` in the place of the first one in a frontier of `size`."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and (
            keys[child + 1, 0] > keys[child, 0]
            or (
                keys[child + 1, 0] == keys[child, 0]
                and _tie_before(heap[child + 1, 0], heap[child, 0], prefixes)
            )
        ):
            child += 1
        if key > keys[child, 0] or (
            key == keys[child, 0] and _tie_before(new, heap[child, 0], prefixes)
        ):
            break
        keys[at, 0], heap[at, 0] = keys[child, 0], heap[child, 0]
        at = child
    keys[at, 0], heap[at, 0] = key, new


@compiled
def grow(logits, best, blocks, log_total, tokens, logq, ranked, first, root, budget, most, keep_chain, nodes, log_weights):  # noqa: E501  # fmt: skip
    """One tree of `budget` nodes and the root; there must be that many prefixes.

    Its slots are the rows from `first` on of logits [N, blocks, B], of best [N, blocks], which has each block's maximum
    and is used up, and of log_total float64 [N], the log-sum-exp. blocks int64 [1 or N, blocks]: block b holds the
    token ids from blocks[row, b] * B on, and these ascend. tokens int64 and logq float64 [D, min(most, budget)] hold the
    ranks of each slot that are known, ranked int64 [D] how many; missing ones are added. most: how many ranks of a slot
    may be used, at most as many as there are tokens. nodes int64 [3, budget + 1] gets tokens, parents and depths, and
    log_weights float64 [budget + 1] the weights; node 0 is `root`.
    """
    count, width = logits.shape[1], logits.shape[2]
    slots, most = len(ranked), min(most, budget)
    # All scratch has two dimensions and one of two types: each other kind of np.empty takes long to compile.
    place = np.empty((slots, count), np.int64)
    tops = np.empty((slots, (count + GROUP - 1) // GROUP), np.float64)

    # Prefixes by number; 0 is the root. One gets its number when it enters the frontier, which it does once: by its
    # sibling one rank up or, at rank 0, by its parent. Both come before it in the order, so the top of the frontier is
    # always the next of all prefixes that are left.
    prefixes = np.empty((2 * budget + 1, 4), np.int64)
    weights = np.empty((2 * budget + 1, 1), np.float64)
    frontier = np.empty((2 * budget + 1, 1), np.int64)
    keys = np.empty((2 * budget + 1, 1), np.float64)
    for column in range(4):
        prefixes[0, column] = 0
    nodes[0, 0], nodes[1, 0], nodes[2, 0] = root, -1, 0
    weights[0, 0] = log_weights[0] = 0.0
    known, waiting = 1, 0
    chain = slots if keep_chain else 0
    last = 0  # the prefix that joined the tree last
    spent = False  # whether it is still on top of the frontier
    for n in range(1, budget + 1):
        for child in range(2):  # its sibling, then its first child
            parent = last if child else prefixes[last, PARENT]
            rank = 0 if child else prefixes[last, RANK] + 1
            depth = prefixes[last, DEPTH] + child
            slot = depth - 1
            # A node of depth d and rank r (from 0) comes after d - 1 ancestors and r siblings, which are all different.
            if 0 <= slot < slots and rank < most and rank + depth <= budget:
                if rank == ranked[slot]:
                    row = first + slot
                    if rank == 0:
                        for i in range(count):
                            place[slot, i] = -1
                        for i in range(tops.shape[1]):
                            stop = min(i * GROUP + GROUP, count)
                            tops[slot, i] = best[row, _first_highest(best, row, i * GROUP, stop)]
                    block, at = _take(logits, best, place, tops, row, slot)
                    tokens[slot, rank] = blocks[min(row, len(blocks) - 1), block] * width + at
                    # Never above 0, however the total was rounded: no child may outweigh its parent.
                    logq[slot, rank] = min(np.float64(logits[row, block, at]) - log_total[row], 0.0)
                    ranked[slot] += 1
                key = weights[parent, 0] + logq[slot, rank]
                weights[known, 0] = key
                prefixes[known, DEPTH] = depth
                prefixes[known, PARENT] = parent
                prefixes[known, RANK] = rank
                if spent:  # the sibling, mostly
                    _replace(keys, frontier, waiting, key, known, prefixes)
                    spent = False
                elif n > chain or not child:
                    _push(keys, frontier, waiting, key, known, prefixes)
                    waiting += 1
                known += 1
        if n <= chain:
            last = known - 1  # the first child, whatever its weight
        else:
            if spent:
                waiting -= 1
                _replace(keys, frontier, waiting, keys[waiting, 0], frontier[waiting, 0], prefixes)
            last = frontier[0, 0]
            spent = True
        prefixes[last, NODE] = n
        nodes[0, n] = tokens[prefixes[last, DEPTH] - 1, prefixes[last, RANK]]
        nodes[1, n] = prefixes[prefixes[last, PARENT], NODE]
        nodes[2, n] = prefixes[last, DEPTH]
        log_weights[n] = weights[last, 0]


@compiled
def join(logits, best, blocks, log_total, budget, most, keep_chain, wanted, joined):
    """R trees, and where in each the prefixes of wanted [R, D] are: fills joined [R, D] with node indices.

    Round r has the rows from r * D on; the arguments are as for `grow`. `joined` is left alone for the others.
    """
    rounds, slots = wanted.shape
    tokens = np.empty((slots, min(most, budget)), np.int64)
    logq = np.empty((slots, min(most, budget)), np.float64)
    ranked = np.empty(slots, np.int64)
    nodes = np.empty((3, budget + 1), np.int64)
    log_weights = np.empty(budget + 1, np.float64)
    for r in range(rounds):
        for slot in range(slots):
            ranked[slot] = 0
        grow(
            logits, best, blocks, log_total, tokens, logq, ranked, r * slots, 0,
            budget, most, keep_chain, nodes, log_weights,
        )  # fmt: skip
        here, depth = 0, 0
        for node in range(1, budget + 1):
            if depth < slots and nodes[1, node] == here and nodes[0, node] == wanted[r, depth]:
                joined[r, depth] = node
                here = node
                depth += 1


@compiled
def follow(tokens, parents, next_tokens, path):
    """Walk a tree from the root along each node's next token. Fills path, returns its length."""
    path[0] = 0
    length = 1
    # A child's index is above its parent's, so one pass meets the whole path.
    for node in range(1, len(tokens)):
        if parents[node] == path[length - 1] and tokens[node] == next_tokens[parents[node]]:
            path[length] = node
            length += 1
    return length


@compiled
def mark_ancestors(parents, mask):
    """Set mask[i, j] where j is i or an ancestor of i."""
    for node in range(len(parents)):
        ancestor = node
        while ancestor > 0:
            mask[node, ancestor] = True
            ancestor = parents[ancestor]
        mask[node, 0] = True
