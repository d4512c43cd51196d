"""Who is said to be to blame for a NaN, for every kind of cause. What a run does then: tests/test_train_state.py."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from configs.load import UserError
from tests.test_train_loss import SHAPE, make_batch, make_config
from train.nonfinite import MOST_SKIPS, report_nonfinite
from train.step import Prepared, prepare

FINE = torch.tensor(1.0)
NAN = torch.tensor(torch.nan)


def micro_batches() -> list[Prepared]:
    """Two micro-batches of two rows of two documents each: a to d, and e to h."""
    parts = [prepare(make_batch(), make_config(), SHAPE) for _ in range(2)]
    for part, names in zip(parts, ("abcd", "efgh"), strict=True):
        part.batch.sample_ids = [*names]
    return parts


def said(parts: list[Prepared], losses: list[torch.Tensor]) -> str:
    with pytest.raises(UserError) as caught:
        report_nonfinite(
            Accelerator(cpu=True), parts, losses, step=7, norm=torch.inf, skip=False, skips=1
        )
    return str(caught.value)


@pytest.mark.parametrize("where", ["features", "last_hidden"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_a_sample_with_a_bad_state_is_named_alone(where: str, what: float) -> None:
    """Also when all losses are lost by it."""
    parts = micro_batches()
    getattr(parts[1].batch, where)[0, 11, 1] = what  # row 0, its second document
    out = said(parts, [NAN, NAN])
    assert out.startswith("step 7 has gradient norm inf; samples with NaN or Inf in their stored")
    assert "stored states: f (rank 0); the last checkpoint is untouched" in out


def test_with_sound_states_those_of_the_lost_loss_are_named() -> None:
    assert "samples whose loss is not finite: e, f, g, h (rank 0);" in said(
        micro_batches(), [FINE, torch.tensor(torch.inf)]
    )


def test_with_sound_losses_all_of_the_step_are_named_and_no_list_is_endless() -> None:
    parts = micro_batches()
    assert "samples of this step: a, b, c, d, e, f, g, h (rank 0);" in said(parts, [FINE, FINE])
    parts[0].batch.document[1, 9:] = torch.arange(1, 6)  # five short ones in place of one
    parts[0].batch.sample_ids += ["w", "x", "y", "z"]
    assert "finite: a, b, c, d, w, x, y, z (rank 0);" in said(parts, [NAN, FINE])
    assert "step: a, b, c, d, w, x, y, z and 4 more (rank 0);" in said(parts, [FINE, FINE])


def test_a_skip_is_said_and_the_last_of_too_many_ends_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def report(skips: int) -> None:
        report_nonfinite(
            Accelerator(cpu=True), micro_batches(), [FINE, NAN],
            step=7, norm=torch.nan, skip=True, skips=skips,
        )  # fmt: skip

    report(MOST_SKIPS - 1)
    out = capsys.readouterr().out
    assert (
        out.startswith("skipped: step 7 has gradient norm nan; samples whose loss")
        and "e, f" in out
    )
    with pytest.raises(UserError, match="10 steps in a row were skipped; step 7 has"):
        report(MOST_SKIPS)
