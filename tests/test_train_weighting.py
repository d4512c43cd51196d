"""What a slot counts, by hand."""

from __future__ import annotations

import torch

from train.weighting import decay_weights, default_gamma, dpace_weights


def test_decay_starts_from_one_and_skips_what_is_not_supervised():
    supervised = torch.tensor([[[False, True, True, False]]])
    weights = decay_weights(supervised, gamma=2.0)[0, 0]
    assert weights[0] == 0 and weights[3] == 0
    torch.testing.assert_close(weights[1:3], torch.tensor([1.0, 0.60653067]))
    assert [default_gamma(b) for b in (16, 10, 8, 4)] == [7.0, 5.0, 4.0, 2.0]


def test_dpace_weights_are_the_rest_of_the_expected_accepted_length():
    """Smoothed confidences 1, 0.75, 0.5: prefixes 1, 0.75, 0.375; a cut block ends where it is cut."""
    q = torch.tensor([[0.9, 1.0, 0.5, 0.0], [0.9, 1.0, 0.5, 0.0], [0.9, 1.0, 0.5, 0.0]])
    supervised = torch.tensor(
        [[False, True, True, True], [False, True, True, False], [False, False, False, False]]
    )
    weights = dpace_weights(q, supervised)
    expected = [[0, 2.125, 1.125, 0.375], [0, 1.75, 0.75, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(weights, torch.tensor(expected))
