"""Hours, GPUs, bytes and money of a run before it is paid for, and what limits each stage.

    python bench/scaling.py
    python bench/scaling.py --target Qwen3-8B --set gpu_hour=1.8 --set samples=200000 --set storage_bytes=1

Arithmetic only: every figure follows from `Inputs`, which --set changes one by one. The rates are assumptions until they
are measured on the machine in question (`extract/main.py --dry-run`, tokens_per_second in metrics.jsonl). In the
last column a simulation of shards that are owned by rank (r, r + w, ...), with slow ranks and nodes that die.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass(frozen=True)
class Inputs:
    # the data and the recipe
    samples: float = 800_000
    prompt_tokens: float = 224
    answer_tokens: float = 800
    epochs: float = 6
    row_tokens: float = 3072
    anchors: float = 512
    block: float = 16
    taps: float = 5
    drafter_layers: float = 5
    storage_bytes: float = 2  # of a stored value: bfloat16; 1 is float8_e4m3fn
    # a GPU (H100 SXM by its data sheet) and what of it is reached: assumptions
    flops: float = 989e12
    memory: float = 80e9
    bandwidth: float = 3.35e12
    share_forward: float = 0.4  # of flops, over whole answers
    share_train: float = 0.3
    share_decode: float = 0.5  # of bandwidth
    answers_at_once: float = 256  # of a copy of the target
    gpu_hour: float = 2.5  # money
    # a node and the cluster's disk
    gpus_per_node: float = 8
    network: float = 50e9  # bytes/s of a node, both ways
    disk_node: float = 2e9  # bytes/s of a node
    disk_all: float = 40e9  # bytes/s of the file system, whatever the number of nodes
    # what goes wrong
    shard_tokens: float = 65536
    spread: float = 0.05  # of the ranks' speeds
    stragglers: float = 0.005  # share of ranks ...
    straggling: float = 2.0  # ... that take so many times as long
    node_days: float = 60  # between failures of one node
    restart_minutes: float = 10  # queue, start, load the target


@dataclass(frozen=True)
class Target:
    parameters: float
    active: float
    layers: int
    hidden: int
    vocabulary: int
    attention: int  # heads * head_dim
    key_values: int  # its key-value heads * head_dim
    mlp: int  # of the drafter's layers
    cached_layers: int  # that keep keys and values


SMALL = "SmolLM2-135M"  # the demo's, to hold the arithmetic against what was measured
TARGETS = {
    SMALL: Target(135e6, 106e6, 30, 576, 49_152, 576, 192, 1536, 30),
    "Qwen3-8B": Target(8.2e9, 8.2e9, 36, 4096, 151_936, 4096, 1024, 12_288, 36),
    "Qwen3.6-27B": Target(27e9, 27e9, 64, 5120, 248_320, 6144, 1024, 17_408, 16),
    "235B MoE, 22B active": Target(235e9, 22e9, 94, 4096, 151_936, 8192, 512, 12_288, 94),
}


@dataclass(frozen=True)
class Stage:
    hours: float
    limit: str


def tokens(i: Inputs) -> float:
    return i.samples * (i.prompt_tokens + i.answer_tokens)


def state_bytes(t: Target, i: Inputs) -> float:
    """Of all training states."""
    return tokens(i) * i.taps * t.hidden * i.storage_bytes


def copy_gpus(t: Target, i: Inputs) -> int:
    """GPUs that one copy of the target takes, in bfloat16 with a quarter of the memory left for the cache."""
    return 2 ** math.ceil(math.log2(max(1.0, 2 * t.parameters / (0.75 * i.memory))))


def slowest(**hours: float) -> Stage:
    name = max(hours, key=lambda key: hours[key])
    return Stage(hours[name], name)


def disk(i: Inputs, size: float, gpus: int) -> float:
    """Hours to move so many bytes."""
    return size / min(math.ceil(gpus / i.gpus_per_node) * i.disk_node, i.disk_all) / 3600


def answering(t: Target, i: Inputs, gpus: int) -> Stage:
    """Greedy decoding, `answers_at_once` a copy: weights and cache are read once a step, or arithmetic takes longer."""
    each = copy_gpus(t, i)
    if gpus < each:
        return Stage(math.inf, f"needs {each} GPUs")
    context = i.prompt_tokens + i.answer_tokens / 2
    cache = i.answers_at_once * context * t.cached_layers * t.key_values * 2 * 2
    read = (2 * t.parameters + cache) / (each * i.bandwidth * i.share_decode)
    compute = 2 * t.active * i.answers_at_once / (each * i.flops * i.share_forward)
    steps = i.samples * i.answer_tokens / i.answers_at_once / (gpus // each) / 3600
    return slowest(memory=steps * read, arithmetic=steps * compute)


def states(t: Target, i: Inputs, gpus: int) -> Stage:
    """One forward over prompts and answers, and the disk."""
    if gpus < copy_gpus(t, i):
        return Stage(math.inf, f"needs {copy_gpus(t, i)} GPUs")
    compute = 2 * t.active * tokens(i) / (gpus * i.flops * i.share_forward) / 3600
    return slowest(arithmetic=compute, disk=disk(i, state_bytes(t, i), gpus))


def drafter_parameters(t: Target, i: Inputs) -> float:
    layer = t.hidden * (2 * t.attention + 2 * t.key_values + 3 * t.mlp)
    return i.drafter_layers * layer + i.taps * t.hidden**2


def row_flops(t: Target, i: Inputs) -> float:
    """Of one packed row, forward and backward. The head is frozen: two products and not three."""
    slots, per_layer = (
        i.anchors * i.block,
        t.hidden * (2 * t.attention + 2 * t.key_values + 3 * t.mlp),
    )
    context = i.row_tokens * (i.taps * t.hidden**2 + i.drafter_layers * 2 * t.hidden * t.key_values)
    seen = i.row_tokens / 2 + i.block
    attention = i.drafter_layers * slots * seen * 2 * t.attention
    head = slots * t.hidden * t.vocabulary
    return 6 * (context + i.drafter_layers * slots * per_layer + attention) + 4 * head


def training(t: Target, i: Inputs, gpus: int) -> Stage:
    """A row a GPU and step; states are read once an epoch, gradients (float32) go round the nodes each step."""
    rows = tokens(i) / i.row_tokens * i.epochs
    compute = rows * row_flops(t, i) / (gpus * i.flops * i.share_train) / 3600
    nodes = math.ceil(gpus / i.gpus_per_node)
    talk = 2 * 4 * drafter_parameters(t, i) * (nodes - 1) / nodes / i.network * rows / gpus / 3600
    return slowest(
        arithmetic=compute, network=talk, disk=disk(i, state_bytes(t, i) * i.epochs, gpus)
    )


def simulate(i: Inputs, ranks: int, hours: float, seed: int = 0) -> tuple[float, float, float]:
    """(hours when all ranks are alike, with slow ranks, with dying nodes too) of an extraction of `hours`.

    Every rank owns the shards r, r + w, ... A node that dies ends the job; it is queued again, finished
    shards are kept and every rank loses the one under way.
    """
    draw = np.random.default_rng(seed)
    shards = max(1, math.ceil(tokens(i) / i.shard_tokens))
    owned = np.bincount(np.arange(shards) % ranks, minlength=ranks)
    each = hours * ranks / shards  # of a shard
    pace = each * draw.lognormal(0, i.spread, ranks)
    pace[draw.random(ranks) < i.stragglers] *= i.straggling
    alike, slow = float(owned.max() * each), float((owned * pace).max())
    left, clock = owned.astype(float), 0.0
    rate = math.ceil(ranks / i.gpus_per_node) / (i.node_days * 24)  # failures an hour
    while left.any():
        until, need = draw.exponential(1 / rate), float((left * pace).max())
        clock += min(until, need)
        if until >= need:
            break
        left -= np.minimum(left, np.floor(until / pace))
        clock += i.restart_minutes / 60
    return alike, slow, clock


def report(name: str, t: Target, i: Inputs, counts: list[int]) -> list[str]:
    size = state_bytes(t, i)
    lines = [
        f"## {name}",
        "",
        f"{tokens(i) / 1e6:,.0f} M tokens, {i.taps * t.hidden * i.storage_bytes / 1024:.0f} KiB of states each: "
        f"{size / 1e12:,.1f} TB; a drafter of {drafter_parameters(t, i) / 1e9:.2f} G parameters; "
        f"{tokens(i) / i.row_tokens * i.epochs:,.0f} rows of {row_flops(t, i) / 1e12:,.0f} TFLOP.",
        "",
        "| GPUs | answers, h | states, h | training, h | all, h | money | rows a step "
        "| extraction, h: slow ranks, failures too |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for gpus in counts:
        parts = [stage(t, i, gpus) for stage in (answering, states, training)]
        cells = [f"{p.hours:,.1f} ({p.limit})" if p.hours < math.inf else p.limit for p in parts]
        total = sum(p.hours for p in parts)
        if total < math.inf:
            _, slow, failing = simulate(i, gpus, parts[0].hours + parts[1].hours)
            cells += [f"{total:,.1f}", f"{total * gpus * i.gpu_hour:,.0f}", f"{gpus}"]
            cells += [f"{slow:,.1f}, {failing:,.1f}"]
        else:
            cells += ["", "", "", ""]
        lines.append(f"| {gpus} | {' | '.join(cells)} |")
    return [*lines, ""]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", choices=list(TARGETS), action="append")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--set", dest="changes", metavar="NAME=NUMBER", action="append", default=[])
    args = parser.parse_args(argv)
    known = {field.name for field in fields(Inputs)}
    changes = dict(text.partition("=")[::2] for text in args.changes)
    if unknown := changes.keys() - known:
        parser.error(
            f"--set knows no {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}"
        )
    inputs = replace(Inputs(), **{name: float(value) for name, value in changes.items()})
    for name in args.target or [name for name in TARGETS if name != SMALL]:
        print("\n".join(report(name, TARGETS[name], inputs, args.gpus)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
