"""Does an answer go round in circles? Small targets do, decoding greedily."""

from __future__ import annotations

from collections.abc import Sequence

# An answer is called degenerate when more than this share of its 8-grams occurred before.
REPETITIVE = 0.5


def repetition_rate(tokens: Sequence[int], n: int = 8) -> float:
    """Share of an answer's n-grams that occurred in it before; 0 if it has no n-gram.

    A looping answer comes near 1. Loops are easy to draft: they lift tau and mean nothing.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
