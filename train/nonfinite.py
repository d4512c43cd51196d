"""A step whose loss or gradient norm is NaN or Inf: who is to blame, and whether training goes on without it."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from configs.load import UserError
from train.batches import Batch
from train.step import Prepared

MOST_SKIPS = 10  # in a row
SHOWN = 8


def report_nonfinite(
    accelerator: Accelerator,
    micro: Sequence[Prepared],
    losses: Sequence[Tensor],
    *,
    step: int,
    norm: float,
    skip: bool,
    skips: int,
) -> None:
    """Say which samples of which ranks it was; all ranks call this. `losses` has one of each of this rank's `micro`.

    UserError, on all ranks, unless the step may be skipped; `skips` counts this one and those right before it.
    """
    what = f"step {step} has gradient norm {norm:.3g}; {blame(accelerator, micro, losses)}"
    if not skip:
        raise UserError(
            f"{what}; the last checkpoint is untouched; lower train.learning_rate, check the samples with "
            "extract/main.py --verify, or set train.nonfinite=skip"
        )
    if skips >= MOST_SKIPS:
        raise UserError(
            f"{skips} steps in a row were skipped; {what}; the last checkpoint is untouched; lower train.learning_rate "
            "or check the samples with extract/main.py --verify"
        )
    accelerator.print(f"skipped: {what}", flush=True)


def blame(accelerator: Accelerator, micro: Sequence[Prepared], losses: Sequence[Tensor]) -> str:
    """What to look at after a step without a finite norm, gathered from all ranks: the samples with NaN or Inf in their
    states; or else those that shared a micro-batch with a loss like that; or else all of the step."""
    stored, lost, everything = [], [], []
    for part, loss in zip(micro, losses, strict=True):
        batch = part.batch
        everything += batch.sample_ids
        if not loss.isfinite():
            lost += batch.sample_ids
        stored += [
            i for i, sound in zip(batch.sample_ids, sound_samples(batch), strict=True) if not sound
        ]
    ranks: list[tuple[list[str], ...]] = gather_object([(stored, lost, everything)])
    kinds = ("with NaN or Inf in their stored states", "whose loss is not finite", "of this step")
    for kind, by_rank in zip(kinds, zip(*ranks, strict=True), strict=True):
        if any(by_rank):
            return f"samples {kind}: " + "; ".join(
                f"{listed(ids)} (rank {rank})" for rank, ids in enumerate(by_rank) if ids
            )
    return "no samples"


def listed(ids: Sequence[str]) -> str:
    more = len(ids) - SHOWN
    return ", ".join(ids[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def sound_samples(batch: Batch) -> list[bool]:
    """Whether the stored states of each of batch.sample_ids are finite."""
    good = batch.features.isfinite().all(-1)  # [R, L]
    if batch.last_hidden is not None:
        good &= batch.last_hidden.isfinite().all(-1)
    return [
        bool(good[row, document == number].all())
        for row, document in enumerate(batch.document)
        for number in range(int(document.max()) + 1)
    ]
