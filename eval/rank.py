"""What growth needs to know of the slots' logits: their normaliser, and blocks to find the highest logits in.

That is all that looks at the whole vocabulary: one pass for the normaliser, one for the maximum of every block. Ranks
are then taken on demand (eval.grow), from the logits themselves where they are on the host. From another device only
the blocks that can matter are copied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

# Tokens in a block. On the host a block costs one entry in a list of maxima and, where a token is taken, a scan; from
# another device the blocks are copied, so small ones are better.
HOST_BLOCK, COPIED_BLOCK = 128, 8
# Logits exponentiated at a time on the host, so that they and their exponentials stay in the cache.
CHUNK = 160_000


class Slots(NamedTuple):
    """N slots (of one or several drafter passes) on the host; the arguments that eval.grow's functions begin with."""

    logits: NDArray[np.floating]  # [N, blocks, B], the logits' own precision, at least float32
    best: NDArray[np.floating]  # [N, blocks], the maximum of each block; growth uses it up
    blocks: NDArray[np.int64]  # [1 or N, blocks]: block b holds the ids from B * blocks[row, b] on
    log_total: NDArray[np.float64]  # [N], log-sum-exp


def lay_out(rows: Tensor, depth: int, most: int, *, copied: bool) -> Slots:
    """The slots of rows [N, V], slot d of a pass at row d - 1 modulo `depth`.

    copied: keep only the blocks that hold the first `most` ranks of a slot, which is all that growth may then ask for.
    Raises ValueError where a slot has no finite softmax.
    """
    exact = rows.detach() if rows.dtype in (torch.float32, torch.float64) else rows.detach().float()
    log_total = _log_totals(exact, depth)
    width = COPIED_BLOCK if copied else HOST_BLOCK
    if missing := -exact.shape[1] % width:
        # After every real token: these have the highest ids, and no logit is lower.
        exact = F.pad(exact, (0, missing), value=-torch.inf)
    logits = exact.reshape(len(exact), exact.shape[1] // width, width)
    best = logits.amax(2)
    if not copied:
        return Slots(logits.numpy(), best.numpy(), np.arange(best.shape[1])[None], log_total)
    # A token outside the `most` best blocks has at least `most` better ones, the best of each of them. Equal maxima:
    # the lower block first, as its ids are lower.
    order = best.sort(dim=1, descending=True, stable=True).indices[:, :most].sort(dim=1).values
    logits = logits.gather(1, order[:, :, None].expand(-1, -1, width))
    best = best.gather(1, order)
    return Slots(logits.cpu().numpy(), best.cpu().numpy(), order.cpu().numpy(), log_total)


def _log_totals(rows: Tensor, depth: int) -> NDArray[np.float64]:
    """Log-sum-exp of each row of [N, V], summed in the rows' precision.

    On the host every pass is split in the same way, so its trees are the same alone and among others: how many rows
    are summed at once can decide the last bit, and that can decide between prefixes of nearly equal weight.
    """
    on_host = rows.device.type == "cpu"
    step = max(1, CHUNK // rows.shape[1]) if on_host else len(rows)
    # Without subtracting the maximum first, which is one pass over memory less. Where float32 could overflow or lose
    # terms that count, the total tells, and the row is done again.
    totals = [
        part.exp().sum(1)
        for drafted in (rows.split(depth) if on_host else [rows])
        for part in drafted.split(step)
    ]
    with np.errstate(divide="ignore"):
        log_total = np.log(torch.cat(totals).cpu().numpy().astype(np.float64))
    again = np.flatnonzero(~(np.abs(log_total) < 50))
    if len(again):
        for i in again:
            log_total[i] = float(rows[i].logsumexp(0))  # by itself, for the same reason
        # Not finite for a NaN, a +inf, or nothing but -inf (a lone -inf is a token ruled out).
        bad = np.flatnonzero(~np.isfinite(log_total))
        if len(bad):
            raise ValueError(f"slot {bad[0] % depth + 1} has NaN logits or no finite softmax")
    return log_total
