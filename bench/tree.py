"""Building draft trees: ours side by side with the published way, in one run.

    python bench/tree.py

The published way is a full top-k and log-sum-exp over the slots, a Python heap, and a Python loop over the mask's rows.
Columns: `grow` starts from ranked candidates on the host and ends with tokens, parents, depths, weights and the
ancestor mask as tensors. `rank` is candidates and normaliser; ours ranks while it grows, so our figure holds the
growth too. `pass` is all of it, from logits to tree and mask. Milliseconds, the best of many alternating runs.
On a machine that others use too, OMP_WAIT_POLICY=PASSIVE keeps torch's threads from spinning while one has no core.
"""

import argparse
import heapq
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eval.rank import lay_out
from eval.tree import Ranks, Tree, build_tree, grow_tree, tree_accepted_lengths

DEPTH = 15
BUDGETS = (16, 64, 256, 512, 1024)
VOCABULARIES = (49152, 151936)
# Standard normal logits are almost flat: hardly a tree past depth 2. A drafter's are peaked: trees of many depths.
LOGITS = {"flat": 0.0, "peaked": 8.0}

Fields = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_logits(vocabulary: int, boost: float) -> Tensor:
    """[15, V]: normal, and in each slot a few tokens that stand out by falling amounts."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(DEPTH, vocabulary, generator=generator)
    if boost:
        chosen = torch.rand(DEPTH, vocabulary, generator=generator).topk(400).indices
        falling = boost + 6 - 1.2 * torch.arange(1, 401).log2()
        logits.scatter_add_(1, chosen, falling.expand(DEPTH, -1).contiguous())
    return logits


def published_rank(logits: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(min(budget, logits.shape[1]), dim=-1)
    return ids, values - logits.logsumexp(-1, keepdim=True)


def published_grow(ids: Tensor, logq: Tensor, root: int, budget: int) -> Fields:
    slot_tokens, slot_logq = ids.numpy(), logq.numpy()
    tokens, parents, depths, weights = [root], [-1], [0], [0.0]
    heap: list[tuple[float, tuple[int, ...], int]] = [(-float(slot_logq[0, 0]), (0,), 0)]
    while heap and len(tokens) <= budget:
        negative, ranks, parent = heapq.heappop(heap)
        depth, rank, node = len(ranks), ranks[-1], len(tokens)
        tokens.append(int(slot_tokens[depth - 1, rank]))
        parents.append(parent)
        depths.append(depth)
        weights.append(-negative)
        if rank + 1 < slot_logq.shape[1]:
            own = negative + float(slot_logq[depth - 1, rank] - slot_logq[depth - 1, rank + 1])
            heapq.heappush(heap, (own, (*ranks[:-1], rank + 1), parent))
        if depth < len(slot_logq):
            heapq.heappush(heap, (negative - float(slot_logq[depth, 0]), (*ranks, 0), node))
    mask = np.zeros((len(tokens), len(tokens)), dtype=np.bool_)
    mask[0, 0] = True
    for node in range(1, len(tokens)):
        mask[node, :node] = mask[parents[node], :node]
        mask[node, node] = True
    return (
        torch.tensor(tokens),
        torch.tensor(parents),
        torch.tensor(depths),
        torch.tensor(weights, dtype=torch.float64),
        torch.from_numpy(mask),
    )


def published_pass(logits: Tensor, budget: int) -> Fields:
    return published_grow(*published_rank(logits, budget), 0, budget)


def our_grow(logits: Tensor, budget: int) -> Callable[[], Fields]:
    """Growth from known ranks, all of them, as the published way has them."""
    ids, logq = published_rank(logits.double(), budget)
    slots = lay_out(logits, DEPTH, budget, copied=False)
    ranks = Ranks(ids.numpy(), logq.numpy(), np.full(DEPTH, budget))
    cpu = torch.device("cpu")
    return lambda: fields(grow_tree(slots, ranks, 0, budget, budget, keep_chain=False, device=cpu))


def our_pass(logits: Tensor, budget: int) -> Fields:
    return fields(build_tree(logits, 0, budget))


def our_rank(logits: Tensor, budget: int) -> None:
    build_tree(logits, 0, budget)


def fields(tree: Tree) -> Fields:
    return tree.tokens, tree.parents, tree.depths, tree.log_weights, tree.ancestor_mask()


def race(first: Callable[[], object], second: Callable[[], object], seconds: float) -> list[float]:
    """Milliseconds of each, the best of short bursts that take turns, so that a busy machine slows both."""
    best = [float("inf"), float("inf")]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, function in enumerate((first, second)):
            for _ in range(5):  # torch's threads are awake after the first
                started = time.perf_counter()
                function()
                best[i] = min(best[i], 1e3 * (time.perf_counter() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each pair of figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    build_tree(torch.zeros(2, 256), 0, 2).ancestor_mask()
    print(f"first tree (compiling, or reading the cache): {time.perf_counter() - started:.2f} s")
    print(f"{DEPTH} slots, float32, {options.threads} threads; ms published / ours = ratio")
    print(f"{'V':>7} {'logits':>7} {'budget':>6} {'depth':>5}" + "".join(
        f"{name:>26}" for name in ("grow", "rank", "pass")
    ))  # fmt: skip
    for vocabulary in VOCABULARIES:
        for name, boost in LOGITS.items():
            logits = make_logits(vocabulary, boost)
            for budget in BUDGETS:
                ids, logq = published_rank(logits, budget)
                mine, theirs = our_pass(logits, budget), published_pass(logits, budget)
                # The published sums round differently, so near-ties may swap; the weights say it is the same tree.
                torch.testing.assert_close(mine[3], theirs[3], rtol=0, atol=1e-4)
                pairs: tuple[tuple[Callable[[], object], Callable[[], object]], ...] = (
                    (partial(published_grow, ids, logq, 0, budget), our_grow(logits, budget)),
                    (partial(published_rank, logits, budget), partial(our_rank, logits, budget)),
                    (partial(published_pass, logits, budget), partial(our_pass, logits, budget)),
                )  # fmt: skip
                cells = ""
                for pair in pairs:
                    old, new = race(pair[0], pair[1], options.seconds)
                    cells += f"{old:10.3f} /{new:7.3f} ={old / new:5.1f}"
                print(
                    f"{vocabulary:7} {name:>7} {budget:6} {int(mine[2].max()):5}{cells}", flush=True
                )
    rounds = 32
    logits = torch.stack([make_logits(VOCABULARIES[0], LOGITS["peaked"])] * rounds)
    answers = logits.argmax(-1)
    tree_accepted_lengths(logits[:1], answers[:1], BUDGETS)  # compile
    started = time.perf_counter()
    tree_accepted_lengths(logits, answers, BUDGETS)
    spent = 1e3 * (time.perf_counter() - started) / rounds
    print(f"tree_accepted_lengths, V {VOCABULARIES[0]}, all budgets: {spent:.2f} ms a round")


if __name__ == "__main__":
    main()
