"""Acceptance lengths that others published, to hold a measured one against.

All count the bonus token and were measured greedily, non-thinking, with blocks of 16; a result of another mode, or of
another form of the prompts (docs/benchmarks.md), is not comparable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A published tau: `decoder` and `budget` as in results.json, and who says so."""

    decoder: str
    budget: int | None
    tau: float
    source: str


def published(target_label: str, dataset: str) -> list[Point]:
    """The points of a target on a benchmark, chain first, then by budget; empty when nothing is known.

    `target_label` is a hub id or a folder's name; its owner, its case and its punctuation do not count, nor do the
    latter two in `dataset`.
    """
    return list(_POINTS.get((_key(target_label.rpartition("/")[2]), _key(dataset)), ()))


def _key(name: str) -> str:
    # a dot between digits stays: Qwen3.5 is not Qwen35
    return re.sub(r"(?<!\d)\.|\.(?!\d)|[^\w.]|_", "", name.casefold())


_DFLASH = "DFlash paper"
_DDTREE = "DDTree paper"
_RELEASED = "released drafter"

_POINTS: dict[tuple[str, str], tuple[Point, ...]] = {
    ("qwen38b", "gsm8k"): (Point("dflash", None, 6.54, _DFLASH),),
    ("qwen38b", "math500"): (
        Point("dflash", None, 7.87, _DFLASH),
        Point("dflash", None, 7.79, _DDTREE),
        Point("ddtree", 16, 8.61, _DDTREE),
        Point("ddtree", 32, 9.27, _DDTREE),
        Point("ddtree", 64, 9.75, _DDTREE),
        Point("ddtree", 128, 10.20, _DDTREE),
        Point("ddtree", 256, 10.43, _DDTREE),
        Point("ddtree", 512, 10.73, _DDTREE),
        Point("ddtree", 1024, 10.98, _DDTREE),
    ),
    ("qwen38b", "humaneval"): (Point("dflash", None, 6.50, _DFLASH),),
    ("qwen38b", "mtbench"): (Point("dflash", None, 4.24, _DFLASH),),
    ("qwen3.527b", "math500"): (Point("dflash", None, 7.7, _RELEASED),),
    ("qwen3.527b", "humaneval"): (Point("dflash", None, 9.1, _RELEASED),),
    ("qwen3.527b", "mtbench"): (Point("dflash", None, 5.5, _RELEASED),),
}
