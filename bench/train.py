"""The training step: where its time and memory go, and side by side with SpecForge's DFlash step, in one run.

    python bench/train.py                                  phases, the head in chunks, growth with the anchors
    python bench/train.py --peer DIR                       the same step by specforge: its wheel unpacked into DIR
                                                           (pip download --no-deps specforge==0.2; unzip -d DIR ...)

SmolLM2's widths and random weights; times are medians of steps that take turns, so that a busy machine slows all of them.
A step here is forward, loss and backward; `phases` adds data and optimizer. Peak memory is what a step adds.
On a machine that others use too, OMP_WAIT_POLICY=PASSIVE keeps torch's threads from spinning while one has no core.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder, whose train.py would stand in for the package of that name

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from configs.schema import Config
from extract.head import TargetHead
from extract.shards import Sample
from train.batches import collate
from train.drafter import DFlashDrafter, DraftShape
from train.log import compiled_graphs
from train.loss import slot_losses
from train.optimizer import make_optimizer
from train.step import Prepared, loss_of, prepare, run_drafter
from train.weighting import default_gamma

VOCABULARIES = (49152, 151936)
MASK_TOKEN, TAPS, TARGET_LAYERS = 17, (1, 8, 14, 20, 27), 30
PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}  # dense bf16, by a word of the device's name
Step = Callable[[], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Shape:
    rows: int
    length: int
    anchors: int
    block: int
    layers: int
    device: torch.device
    hidden: int = 576
    intermediate: int = 1536
    vocabulary: int = 49152


def build(shape: Shape) -> tuple[DFlashDrafter, TargetHead]:
    """A random drafter and a random tied head, in float32."""
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        num_key_value_heads=shape.hidden // 192,
        head_dim=64,
        vocab_size=shape.vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        attention_bias=False,
        rms_norm_eps=1e-5,
    )
    drafter = DFlashDrafter(config, DraftShape(shape.block, MASK_TOKEN, TAPS, TARGET_LAYERS))
    drafter.reset_parameters(0)
    generator = torch.Generator().manual_seed(0)
    table = 0.05 * torch.randn(shape.vocabulary, shape.hidden, generator=generator)
    table = table.to(shape.device)
    return drafter.to(shape.device), TargetHead(table, table)


def samples(shape: Shape) -> list[Sample]:
    """One conversation a row (SpecForge does not pack), the last two thirds of it the answer."""
    g = torch.Generator().manual_seed(1)
    mask = (torch.arange(shape.length) >= shape.length // 3).to(torch.uint8)
    return [
        Sample(
            str(i),
            torch.randint(0, shape.vocabulary, (shape.length,), generator=g, dtype=torch.int32),
            mask,
            torch.randn(shape.length, len(TAPS) * shape.hidden, generator=g).bfloat16(),
            None,
        )
        for i in range(shape.rows)
    ]


def lay_out(shape: Shape, conversations: list[Sample]) -> Prepared:
    batch = collate(
        [[(i, s)] for i, s in enumerate(conversations)],
        [0] * len(conversations),
        max_length=shape.length,
        feature_size=len(TAPS) * shape.hidden,
        feature_dtype=torch.bfloat16,
        hidden_size=None,
        seed=0,
    )
    return prepare(
        batch.to(shape.device),
        settings(shape),
        DraftShape(shape.block, MASK_TOKEN, TAPS, TARGET_LAYERS),
    )


def our_step(
    drafter: DFlashDrafter, head: TargetHead, part: Prepared, dtype: torch.dtype, config: Config
) -> Step:
    head = head.to(dtype=dtype)

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        drafter.autocast = None if dtype == torch.float32 else dtype
        numerator, _ = loss_of(run_drafter(drafter, drafter, head, part), head, part, config)
        loss = numerator / part.divisor
        loss.backward()
        return loss.detach(), take_gradients(drafter)

    return step


def specforge_step(
    drafter: DFlashDrafter, head: TargetHead, part: Prepared, dtype: torch.dtype
) -> Step:
    """SpecForge's training model with our weights and our anchors; in bfloat16 its weights are bfloat16, as it trains."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    config, shape = copy.deepcopy(drafter.config), drafter.shape
    config.block_size, config.num_target_layers = shape.block_size, shape.num_target_layers
    config.dflash_config = {
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
    }
    device = part.anchors.device
    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    config._attn_implementation = backend
    draft = DFlashDraftModel(config).to(device, dtype)
    draft.load_state_dict(drafter.state_dict())
    table = head.weight.to(dtype)
    linear = nn.Linear(table.shape[1], table.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(table, requires_grad=False)
    model = OnlineDFlashModel(
        draft,
        linear,
        nn.Embedding.from_pretrained(table),
        shape.mask_token_id,
        shape.block_size,
        attention_backend=backend,
        num_anchors=part.anchors.shape[1],
        loss_decay_gamma=default_gamma(shape.block_size),
    )
    chosen = (part.anchors.clamp(min=0), part.anchors >= 0)
    model._sample_anchor_positions = lambda *_: chosen
    features, mask = part.batch.features.to(dtype), part.batch.loss_mask.float()

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        loss, _, _ = model(part.batch.input_ids, features, mask)
        loss.backward()
        return loss.detach(), take_gradients(draft)

    return step


def settings(shape: Shape) -> Config:
    sections = {
        "target": {"path": "-"},
        "data": {"prompts": ("-",)},
        "drafter": {"block_size": shape.block},
        "train": {"anchors": shape.anchors},
    }
    return Config.model_validate({"run_dir": "-", **sections})


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def race(
    functions: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of each, `repeats` times in turns after one warm-up."""
    spent: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            started = now(device)
            function()
            if turn:
                spent[name].append(1e3 * (now(device) - started))
    return spent


def ratio(spent: dict[str, list[float]], first: str, second: str) -> float:
    """The median of the ratios pair by pair."""
    return statistics.median(a / b for a, b in zip(spent[first], spent[second], strict=True))


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """What a call adds to the memory in use, at most. On a CPU: of the process, so small calls drown in it (Linux)."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is in use now
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith(key)).split()[1])


def flops(shape: Shape, supervised: int) -> float:
    """Of the products of a step that anyone must do: forward and twice that backward, no backward into frozen weights
    or stored features, and attention to what a slot may see only."""
    kv = shape.hidden // 3
    tokens, slots = shape.rows * shape.length, shape.rows * shape.anchors * shape.block
    h, seen = shape.hidden, shape.length * 2 / 3 + shape.block  # an anchor's mean position
    context = tokens * shape.layers * 2 * h * kv
    own = slots * shape.layers * (2 * h * (h + kv) + 3 * h * shape.intermediate + 2 * seen * h)
    return 2 * (
        3 * (context + own) + 2 * tokens * len(TAPS) * h * h + 2 * supervised * h * shape.vocabulary
    )


def phases(shape: Shape, dtype: torch.dtype, repeats: int) -> None:
    (drafter, head), conversations, config = build(shape), samples(shape), settings(shape)
    head = head.to(dtype=dtype)
    drafter.autocast = None if dtype == torch.float32 else dtype
    optimizer = make_optimizer(drafter, config.train)
    spent: dict[str, list[float]] = {}
    supervised = 0

    def step() -> None:
        nonlocal supervised
        marks = [now(shape.device)]
        part = lay_out(shape, conversations)
        marks.append(now(shape.device))
        hidden = run_drafter(drafter, drafter, head, part)
        marks.append(now(shape.device))
        numerator, _ = loss_of(hidden, head, part, config)
        marks.append(now(shape.device))
        (numerator / part.divisor).backward()
        marks.append(now(shape.device))
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        marks.append(now(shape.device))
        names = ("data", "forward", "head and loss", "backward", "optimizer")
        for i, name in enumerate(names):
            spent.setdefault(name, []).append(marks[i + 1] - marks[i])
        supervised = int(part.supervised.sum())

    for _ in range(2):
        step()
    spent.clear()
    peak = peak_bytes(step, shape.device)
    for _ in range(repeats - 1):
        step()
    parts = {name: statistics.median(x) for name, x in spent.items()}
    total = sum(parts.values())
    achieved = flops(shape, supervised) / total
    print(
        f"{str(dtype)[6:]}: step {1e3 * total:.0f} ms, {shape.rows * shape.length / total:.0f} tokens/s, "
        f"{supervised / total:.0f} slots/s, peak {peak / 2**20:.0f} MiB, {achieved / 1e9:.0f} GFLOP/s{mfu(achieved)}, "
        f"{compiled_graphs()} graphs compiled\n    "
        + ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items())
    )


def mfu(achieved: float) -> str:
    if not torch.cuda.is_available():
        return ""
    name = torch.cuda.get_device_name()
    known = [peak for word, peak in PEAK_FLOPS.items() if word in name]
    return f" (MFU {achieved / known[0]:.1%} of {name})" if known else f" ({name})"


def heads(shape: Shape, dtype: torch.dtype, repeats: int) -> None:
    """The chunked head against the plain [slots, vocabulary] cross-entropy, forward and backward."""
    for vocabulary in VOCABULARIES:
        table = 0.05 * torch.randn(vocabulary, shape.hidden, device=shape.device, dtype=dtype)
        head, chunk = TargetHead(table, table), settings(shape).train.loss_chunk
        for slots in (672, 1344, 2688):
            hidden = torch.randn(slots, shape.hidden, device=shape.device, dtype=dtype)
            hidden.requires_grad_()
            targets = torch.randint(0, vocabulary, (slots,), device=shape.device)
            weights = torch.rand(slots, device=shape.device)

            chunked = partial(
                _back, partial(chunked_loss, chunk=chunk), hidden, head, targets, weights
            )
            plain = partial(_back, plain_loss, hidden, table, targets, weights)
            difference = float(abs(chunked() / plain() - 1))
            memory = [peak_bytes(f, shape.device) / 2**20 for f in (plain, chunked)]
            line = f"{str(dtype)[6:]:>8} V {vocabulary:6} slots {slots:4}: "
            line += f"MiB plain / chunked {memory[0]:5.0f} / {memory[1]:5.0f}"
            if slots == 1344:
                spent = race({"plain": plain, "chunked": chunked}, repeats, shape.device)
                ms = [statistics.median(spent[k]) for k in ("plain", "chunked")]
                line += f", ms {ms[0]:.0f} / {ms[1]:.0f} = {ratio(spent, 'plain', 'chunked'):.1f}"
            print(f"{line}, loss differs by {difference:.1e}", flush=True)


def chunked_loss(
    hidden: Tensor, head: TargetHead, targets: Tensor, weights: Tensor, chunk: int
) -> Tensor:
    return (slot_losses(hidden, head, targets, chunk=chunk).loss * weights).sum()


def plain_loss(hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The same sum the obvious way."""
    losses = nn.functional.cross_entropy(hidden @ table.T, targets, reduction="none")
    return (losses * weights).sum()


def _back(loss_of_slots: Callable[..., Any], *inputs: object) -> Tensor:
    loss: Tensor = loss_of_slots(*inputs)
    loss.backward()
    return loss.detach()


def growth(shape: Shape, dtype: torch.dtype, repeats: int) -> None:
    drafter, head = build(shape)
    counts = [shape.anchors // 2, shape.anchors, 2 * shape.anchors, 4 * shape.anchors]
    parts = {n: lay_out(replace(shape, anchors=n), samples(shape)) for n in counts}
    steps = {
        str(n): our_step(drafter, head, part, dtype, settings(shape)) for n, part in parts.items()
    }
    spent = race(steps, repeats, shape.device)
    for n, part in parts.items():
        ms, used = statistics.median(spent[str(n)]), int((part.anchors >= 0).sum())
        print(f"{str(dtype)[6:]:>8} {used:4} anchors: {ms:.0f} ms, {ms / used:.2f} ms each")


def against(shape: Shape, dtype: torch.dtype, repeats: int) -> None:
    (drafter, head), part = build(shape), lay_out(shape, samples(shape))
    mine = our_step(drafter, head, part, dtype, settings(shape))
    theirs = specforge_step(drafter, head, part, dtype)
    (loss, gradients), (other, others) = mine(), theirs()
    apart = max(
        float((gradients[n].float() - g.float()).norm() / g.float().norm())
        for n, g in others.items()
    )
    memory = [peak_bytes(f, shape.device) / 2**20 for f in (theirs, mine)]
    spent = race({"theirs": theirs, "mine": mine}, repeats, shape.device)
    ms = [statistics.median(spent[k]) for k in ("theirs", "mine")]
    print(
        f"{str(dtype)[6:]:>8}: loss {float(other):.6f} / {float(loss):.6f}, gradients differ by {apart:.1e} at most; "
        f"ms {ms[0]:.0f} / {ms[1]:.0f} = {ratio(spent, 'theirs', 'mine'):.2f}; MiB {memory[0]:.0f} / {memory[1]:.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peer", type=Path, help="folder with specforge 0.2's wheel, unpacked")
    parser.add_argument("--only", choices=["phases", "heads", "growth", "peer"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    for name, value in (("rows", 4), ("length", 300), ("anchors", 48), ("block", 8), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(
        options.rows, options.length, options.anchors, options.block, options.layers, device
    )
    print(
        f"{device.type}, {options.threads} threads; {shape.rows} rows of {shape.length} tokens, {shape.anchors} anchors "
        f"a row, B = {shape.block}, {shape.layers} layers; medians of {options.repeats}"
    )
    parts = {"phases": phases, "heads": heads, "growth": growth}
    if options.peer:
        sys.path.insert(0, str(options.peer))
        parts["peer"] = against
    for name, measure in parts.items():
        if options.only in (None, name):
            print({"peer": "specforge / ours"}.get(name, name), flush=True)
            for dtype in (torch.bfloat16, torch.float32):
                measure(shape, dtype, options.repeats)


if __name__ == "__main__":
    main()
