"""Acceptance lengths that others published, to hold a measured one against.

All count the bonus token and were measured greedily with blocks of 16, those of Qwen3 without thinking; a result in
another mode, or of other prompts than those of docs/benchmarks.md, is not comparable.
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

    `target_label` is a hub id or a folder's name; its owner does not count, nor do case, hyphens and underscores
    in either name.
    """
    target, dataset = _key(target_label.rpartition("/")[2]), _key(dataset)
    dataset = {"swebench": "swebenchlite"}.get(dataset, dataset)
    points = [
        Point("dflash", None, chain[dataset], source)
        for (name, source), chain in _CHAIN.items()
        if name == target and dataset in chain
    ]
    tree = _TREE.get((target, dataset), {})
    return points + [Point("ddtree", budget, tau, _DDTREE) for budget, tau in tree.items()]


def _key(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.casefold())


_DFLASH = "DFlash paper"
_DDTREE = "DDTree paper"
_RELEASED = "released drafter"  # z-lab evaluates its Qwen3.5 drafters with thinking on; these do not state the mode

_CHAIN = {
    ("qwen38b", _DFLASH): {"gsm8k": 6.54, "math500": 7.87, "humaneval": 6.50, "mtbench": 4.24},
    ("qwen38b", _DDTREE): {
        "math500": 7.79, "gsm8k": 6.57, "aime24": 7.46, "aime25": 7.39, "humaneval": 6.61, "mbpp": 5.99,
        "livecodebench": 7.22, "swebenchlite": 3.60, "mtbench": 4.28, "alpaca": 3.12,
    },
    ("qwen34b", _DDTREE): {
        "math500": 7.72, "gsm8k": 6.51, "aime24": 7.54, "aime25": 7.37, "humaneval": 6.62, "mbpp": 6.10,
        "livecodebench": 7.02, "swebenchlite": 3.66, "mtbench": 4.38, "alpaca": 3.11,
    },
    ("qwen3.527b", _RELEASED): {"math500": 7.7, "humaneval": 9.1, "mtbench": 5.5},
}  # fmt: skip
_TREE = {
    ("qwen38b", "math500"): {
        16: 8.61, 32: 9.27, 64: 9.75, 128: 10.20, 256: 10.43, 512: 10.73, 1024: 10.98,
    },
}  # fmt: skip
