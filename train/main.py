"""Train a DFlash drafter on extracted states.

    accelerate launch train/main.py --config configs/smollm2-demo.yaml
    accelerate launch --config_file configs/accelerate/zero2.yaml train/main.py --config configs/qwen3-8b.yaml --resume

The loop below is in the order in which things happen. What step s works on (rows, anchors) is a function of the seed
and s alone, so a resumed run continues the interrupted one exactly.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import Tensor

from configs.load import UserError, add_arguments, config_from_args, main_guard
from configs.provenance import FolderLock, fingerprint, open_run_dir
from configs.schema import Config
from extract.head import TargetHead, load_head
from extract.manifest import require
from extract.shards import ShardReader
from train.batches import Batch, Schedule, StepDataset, pack, step_batches
from train.blocks import block_mask, block_targets, choose_anchors, slot_inputs, valid_anchors
from train.build import build_drafter
from train.card import model_card
from train.checkpoint import complete_checkpoints, load_checkpoint, save_checkpoint, trainer_state
from train.drafter import FULL, SLIDING, DFlashDrafter
from train.loss import default_gamma, drafter_loss, slot_weights
from train.optimizer import learning_rate_factor, make_optimizer, set_learning_rate
from train.sampling import SampledHead, StepHead, token_frequency
from train.tracking import Tracker


def main(argv: Sequence[str] | None = None) -> int | None:
    parser = argparse.ArgumentParser(
        description="Train a DFlash drafter on extracted states.",
        epilog="example: accelerate launch train/main.py --config configs/smollm2-demo.yaml",
    )
    add_arguments(parser)
    parser.add_argument(
        "--resume", action="store_true", help="go on from the latest complete checkpoint"
    )
    args = parser.parse_args(argv)
    config = config_from_args(args)
    run_dir = Path(config.run_dir)

    checkpoints = complete_checkpoints(run_dir)
    if checkpoints and not args.resume:
        raise UserError(
            f"{run_dir} has {len(checkpoints)} checkpoints; add --resume or choose another run_dir"
        )
    latest = checkpoints[-1] if checkpoints else None
    reader = ShardReader(run_dir / "states")
    check_states(config, reader, run_dir / "states")

    accelerator = make_accelerator(config)
    main_process = accelerator.is_main_process
    if not main_process:
        return train(config, run_dir, reader, accelerator, latest, args.config)
    with FolderLock(run_dir, "train"):
        open_run_dir(config, stage="train", resume=True)
        return train(config, run_dir, reader, accelerator, latest, args.config)


def train(
    config: Config,
    run_dir: Path,
    reader: ShardReader,
    accelerator: Accelerator,
    latest: Path | None,
    config_file: str,
) -> int:
    options, device = config.train, accelerator.device
    manifest, main_process = reader.manifest, accelerator.is_main_process

    # What every step works on, for the whole run.
    schedule = Schedule(
        rows=pack(reader.lengths, options.max_length),
        batch_size=options.batch_size,
        accumulation=options.gradient_accumulation_steps,
        world=accelerator.num_processes,
        seed=config.seed,
    )
    total_steps = options.max_steps or options.epochs * schedule.steps_per_epoch
    every = options.checkpoint_every or max(1, math.ceil(total_steps / 4))
    gamma = options.decay_gamma or default_gamma(config.drafter.block_size)

    # The drafter alone goes into the engine; the target's embedding and head stay outside, frozen.
    model: Any = build_drafter(config, manifest)
    model.autocast = torch.bfloat16 if options.precision == "bf16" else None
    parameters = sum(p.numel() for p in model.parameters())
    optimizer: Any = make_optimizer(model, options)
    model, optimizer = accelerator.prepare(model, optimizer)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    head = load_head(run_dir / "states", device=device, dtype=dtype)
    sampled = sampled_head(config, reader, head)

    start = 0
    if latest is not None:
        identity = trainer_state(latest)
        require_same_run(identity, config, schedule, latest)
        load_checkpoint(latest, accelerator, model, optimizer)
        start = identity["step"]
    if start >= total_steps:
        accelerator.print(f"training is complete: {latest} is step {start} of {total_steps}")
        return 0
    accelerator.print(
        summary(config, schedule, parameters, accelerator, reader, total_steps, start)
    )

    tracker = Tracker(run_dir, config, stage="train", resume_step=start) if main_process else None
    stop = StopSignal()
    dataset = StepDataset(
        reader, schedule, rank=accelerator.process_index, max_length=options.max_length,
        last_hidden=options.distillation > 0,
    )  # fmt: skip
    batches = step_batches(dataset, start, total_steps, workers=2 if device.type == "cuda" else 0)
    window = Window()
    for step in range(start, total_steps):
        # 1. This step's micro-batches, their anchors, and the global weight they are divided by.
        data_started = time.perf_counter()
        micro = [
            prepare(b.to(device), options.anchors, config.drafter.block_size, gamma)
            for b in next(batches)
        ]
        window.data_seconds += time.perf_counter() - data_started
        weight = accelerator.reduce(
            torch.stack([m.weights.sum() for m in micro]).sum().double(), "sum"
        ).clamp(min=1e-9)

        # 2. Forward and backward. Gradients are averaged over ranks and divided by the accumulation steps later on, so
        #    both are multiplied in: one step is the same for any split of its rows.
        lr = set_learning_rate(
            optimizer, learning_rate_factor(step, total_steps, options.warmup_ratio)
        )
        loss_head = sampled.at(step) if sampled else head
        scale = accelerator.num_processes * options.gradient_accumulation_steps / weight
        sums = torch.zeros(4 + 3 * config.drafter.block_size, dtype=torch.float64, device=device)
        for part in micro:
            with accelerator.accumulate(model):
                hidden = run_drafter(model, accelerator.unwrap_model(model), head, part)
                numerator, correct = loss_of(hidden, loss_head, part, config)
                accelerator.backward(numerator * scale.float())
                sums[:-1] += step_sums(numerator, part, correct)
                if accelerator.sync_gradients:
                    norm = gradient_norm(accelerator, model, options.max_grad_norm)
                if accelerator.distributed_type != DistributedType.DEEPSPEED:
                    if accelerator.sync_gradients:
                        require_finite(numerator, norm, micro, step)
                    optimizer.step()
                    optimizer.zero_grad()
        sums[-1] = stop.requested  # any rank's signal stops all of them
        sums = accelerator.reduce(sums, "sum")
        require_finite(sums[0], norm, micro, step)

        # 3. The log.
        window.add(sums)
        done = step + 1
        if tracker and (done % options.log_every == 0 or done == total_steps):
            line = window.line(
                done, step // schedule.steps_per_epoch, lr, float(norm), config.drafter.block_size
            )
            tracker.log(line)
            print(terminal_line(line, total_steps), flush=True)
            window = Window()

        # 4. The checkpoint.
        stopping = bool(sums[-1] > 0)
        if done % every == 0 or done == total_steps or stopping:
            folder = save_checkpoint(
                run_dir,
                accelerator,
                model,
                optimizer,
                step=done,
                card=model_card(config, manifest, done),
                trainer={"identity": run_identity(config, schedule)},
                keep=options.keep_checkpoints,
            )
            accelerator.print(f"checkpoint: {folder}")
        if stopping:
            accelerator.print(
                f"stopped by {stop.name} at step {done}; add --resume to the same command to go on"
            )
            break
    if tracker:
        tracker.close()
    finished = done == total_steps
    if finished:
        accelerator.print(
            f"next: python eval/main.py --config {config_file} --checkpoint all --mode replay"
        )
    accelerator.end_training()
    return 0 if finished else 128 + (stop.number or signal.SIGTERM)


# --- one step ---------------------------------------------------------------------------------------------------------


@dataclass
class Prepared:
    """A micro-batch with its blocks laid out. A anchors a row, B block size, S = A*B."""

    batch: Batch
    anchors: Tensor  # [R, A]
    targets: Tensor  # [R, A, B]
    supervised: Tensor  # [R, A, B]
    weights: Tensor  # [R, A, B] float32


def prepare(batch: Batch, anchors: int, block_size: int, gamma: float) -> Prepared:
    chosen = choose_anchors(valid_anchors(batch.loss_mask, batch.document), batch.priority, anchors)
    targets, supervised = block_targets(
        batch.input_ids, batch.loss_mask, batch.document, chosen, block_size
    )
    return Prepared(batch, chosen, targets, supervised, slot_weights(supervised, gamma))


def run_drafter(engine: Any, drafter: DFlashDrafter, head: TargetHead, part: Prepared) -> Tensor:
    """Final hidden states of all slots, [R, S, H]. `engine` is the (wrapped) drafter."""
    batch, shape, config = part.batch, drafter.shape, drafter.config
    ids, positions = slot_inputs(
        batch.input_ids, batch.position, part.anchors, shape.block_size, shape.mask_token_id
    )
    masks: dict[str, Tensor | None] = {}
    for kind in set(config.layer_types):
        sliding = kind == SLIDING
        masks[kind] = block_mask(
            batch.document,
            batch.position,
            part.anchors,
            shape.block_size,
            window=config.sliding_window if sliding else None,
            causal=sliding and shape.causal_sliding,
        )
    assert set(masks) <= {FULL, SLIDING}
    dtype = (
        drafter.autocast or torch.float32
    )  # the residual stream is in the arithmetic's precision
    features, embeddings = batch.features.to(dtype), head.embed(ids).to(dtype)
    out: Tensor = engine(features, batch.position, embeddings, positions, masks)
    return out


def loss_of(
    hidden: Tensor, head: TargetHead | StepHead, part: Prepared, config: Config
) -> tuple[Tensor, Tensor]:
    """(sum of weighted losses, correct [R, A, B] bool). Only supervised slots reach the head."""
    keep = part.supervised.flatten()
    picked = hidden.reshape(-1, hidden.shape[-1])[keep]
    teacher = None
    if part.batch.last_hidden is not None:
        rows = torch.arange(len(part.anchors), device=keep.device)[:, None, None]
        offsets = torch.arange(part.targets.shape[2], device=keep.device)
        before = (part.anchors.clamp(min=0)[:, :, None] + offsets - 1).clamp(
            0, part.batch.input_ids.shape[1] - 1
        )
        teacher = part.batch.last_hidden[rows, before].flatten(0, 2)[keep].to(head.weight.dtype)
    numerator, _, correct = drafter_loss(
        picked,
        head,
        part.targets.flatten()[keep],
        part.weights.flatten()[keep],
        teacher=teacher,
        share=config.train.distillation,
        chunk=config.train.loss_chunk,
    )
    out = torch.zeros_like(part.supervised)
    out.view(-1)[keep] = correct
    return numerator, out


def step_sums(numerator: Tensor, part: Prepared, correct: Tensor) -> Tensor:
    """What is added over micro-batches, ranks and steps before anything is divided, [3 + 3B]: numerator, weight, tokens;
    per slot 0..B-1 how many are supervised and how many of them correct; blocks; per slot 1..B-1 how many blocks are
    correct up to it. A block that a turn's end cuts short ends there, it is not wrong (field bug F18)."""
    leading = (correct | ~part.supervised)[:, :, 1:].long().cumprod(2).bool() & part.supervised[
        :, :, 1:
    ]
    blocks = (part.anchors >= 0).sum()
    per_slot = [part.supervised.sum((0, 1)), correct.sum((0, 1)), leading.sum((0, 1))]
    flat = torch.cat(
        [p.double() for p in per_slot[:2]] + [blocks.double()[None], per_slot[2].double()]
    )
    tokens = (part.batch.document >= 0).sum().double()
    head = torch.stack([numerator.detach().double(), part.weights.sum().double(), tokens])
    return torch.cat([head, flat])


def gradient_norm(accelerator: Accelerator, model: Any, limit: float) -> Tensor:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return torch.tensor(float(model.get_global_grad_norm() or 0.0))  # DeepSpeed clips by itself
    norm = accelerator.clip_grad_norm_(model.parameters(), limit)
    assert norm is not None
    return norm


def require_finite(loss: Tensor, norm: Tensor, micro: Sequence[Prepared], step: int) -> None:
    if not (torch.isfinite(loss) and torch.isfinite(torch.as_tensor(norm))):
        ids = [i for part in micro for i in part.batch.sample_ids]
        raise UserError(
            f"step {step + 1} gave loss {float(loss):.3g} and gradient norm {float(norm):.3g}; this rank's samples: "
            f"{', '.join(ids[:8])}{' ...' if len(ids) > 8 else ''}; the last checkpoint is untouched; lower "
            "train.learning_rate or check the samples with extract/main.py --verify"
        )


# --- log --------------------------------------------------------------------------------------------------------------


class Window:
    """Sums since the last logged step."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.started = time.perf_counter()
        self.data_seconds = 0.0

    def add(self, sums: Tensor) -> None:
        self.sums = sums.clone() if self.sums is None else self.sums + sums

    def line(self, step: int, epoch: int, lr: float, norm: float, block: int) -> dict[str, Any]:
        """The metrics.jsonl line. `tau_proxy` is the mean over drawn anchors of 1 + leading correct drafts: an
        estimate, because decoding visits other anchors than the drawn ones (eval has the real tau)."""
        assert self.sums is not None
        numerator, weight, tokens, *rest = self.sums[:-1].tolist()
        supervised, correct = rest[:block], rest[block : 2 * block]
        blocks, leading = rest[2 * block], rest[2 * block + 1 : 3 * block]
        seconds = time.perf_counter() - self.started
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _peak_rss()
        return {
            "step": step,
            "epoch": epoch,
            "tokens": int(tokens),
            "loss": numerator / max(weight, 1e-9),
            "accuracy": sum(correct) / max(sum(supervised), 1),
            "accuracy_at_position": [
                c / max(s, 1) for c, s in zip(correct[1:], supervised[1:], strict=True)
            ],
            "tau_proxy": 1 + sum(leading) / max(blocks, 1),
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_second": tokens / seconds,
            "slots_per_second": sum(supervised) / seconds,
            "data_wait": self.data_seconds / seconds,
            "seconds": seconds,
            "peak_memory_bytes": peak,
        }


def _peak_rss() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def terminal_line(line: dict[str, Any], total: int) -> str:
    return (
        f"step {line['step']}/{total} epoch {line['epoch']} loss {line['loss']:.4f} acc {line['accuracy']:.3f} "
        f"tau~{line['tau_proxy']:.2f} lr {line['lr']:.2e} norm {line['grad_norm']:.2f} "
        f"{line['tokens_per_second']:.0f} tok/s {line['slots_per_second']:.0f} slots/s "
        f"mem {line['peak_memory_bytes'] / 2**30:.1f}G"
    )


# --- start-up ---------------------------------------------------------------------------------------------------------


def make_accelerator(config: Config) -> Accelerator:
    """The accelerator, with the process group that the launcher meant.

    Two silent traps on a CPU: DeepSpeed makes several runs of one process each unless the group is named gloo, and
    plain accelerate does not synchronise gradients unless it is told that this is a CPU run.
    """
    cuda, launched = torch.cuda.is_available(), "WORLD_SIZE" in os.environ
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    accelerator = Accelerator(
        cpu=not cuda and not deepspeed,
        gradient_accumulation_steps=config.train.gradient_accumulation_steps,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if launched and not cuda else [],
        mixed_precision="no",  # the drafter casts for itself; weights and optimizer state stay float32
    )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world:
        raise UserError(
            f"the launcher started {world} processes but this run sees {accelerator.num_processes}"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin.deepspeed_config
        wanted = config.train.gradient_accumulation_steps
        given = plugin.get("gradient_accumulation_steps", "auto")
        if given not in ("auto", wanted):
            raise UserError(
                f"train.gradient_accumulation_steps is {wanted} but the DeepSpeed config says {given}; "
                "set that one to auto"
            )
        if config.train.optimizer == "muon" and plugin["zero_optimization"]["stage"] > 0:
            raise UserError(
                f"train.optimizer=muon needs whole matrices and ZeRO stage {plugin['zero_optimization']['stage']} "
                "cuts them up; use ZeRO stage 0, plain accelerate launch, or adamw"
            )
        plugin.update(
            train_micro_batch_size_per_gpu=config.train.batch_size,
            gradient_accumulation_steps=wanted,
            gradient_clipping=config.train.max_grad_norm,
            zero_allow_untested_optimizer=True,
        )
        for key in ("bf16", "fp16"):
            plugin.pop(key, None)
        plugin.pop("train_batch_size", None)
    return accelerator


def check_states(config: Config, reader: ShardReader, folder: Path) -> None:
    """The states must be what the config says; both values are named."""
    expected: dict[str, object] = {}
    if config.drafter.target_layer_ids is not None:
        expected["target_layer_ids"] = config.drafter.target_layer_ids
    elif len(reader.manifest.target_layer_ids) != config.drafter.num_taps:
        raise UserError(
            f"states in {folder} have {len(reader.manifest.target_layer_ids)} taps, drafter.num_taps is "
            f"{config.drafter.num_taps}; extract again into another run_dir or change the config"
        )
    if config.drafter.mask_token_id is not None:
        expected["mask_token_id"] = config.drafter.mask_token_id
    if config.train.distillation > 0:
        expected["last_hidden"] = True
    require(reader.manifest, folder, **expected)


def sampled_head(config: Config, reader: ShardReader, head: TargetHead) -> SampledHead | None:
    """The head of train.head_tokens, or None when the loss uses all of the vocabulary."""
    count = config.train.head_tokens
    if count is None:
        return None
    try:
        return SampledHead(head, token_frequency(reader, len(head.weight)), count, config.seed)
    except ValueError as error:
        raise UserError(f"train.head_tokens={count}: {error}; unset it") from None


def run_identity(config: Config, schedule: Schedule) -> str:
    """What a resumed run must have in common with the interrupted one for its steps to be the same."""
    options = config.train.model_dump(
        exclude={"log_every", "checkpoint_every", "keep_checkpoints", "loss_chunk"}
    )
    return fingerprint(
        [
            config.seed,
            config.drafter.model_dump(),
            options,
            schedule.rows_per_step,
            len(schedule.rows),
        ]
    )


def require_same_run(
    saved: dict[str, Any], config: Config, schedule: Schedule, checkpoint: Path
) -> None:
    now = run_identity(config, schedule)
    if saved["identity"] != now:
        raise UserError(
            f"{checkpoint} was trained with other seed, drafter, train settings or rows per step "
            f"({saved['identity']}) than this command has ({now}); restore them, or start anew in another run_dir "
            f"with drafter.init_from={checkpoint}"
        )


def summary(
    config: Config,
    schedule: Schedule,
    parameters: int,
    accelerator: Accelerator,
    reader: ShardReader,
    total_steps: int,
    start: int,
) -> str:
    options, totals = config.train, reader.manifest.totals
    cut = sum(n > options.max_length for n in reader.lengths)
    fill = sum(min(n, options.max_length) for n in reader.lengths) / (
        len(schedule.rows) * options.max_length
    )
    lines = [
        f"data:     {totals.samples} samples, {totals.tokens:,} tokens, {totals.supervised_tokens:,} supervised; "
        f"{len(schedule.rows)} rows of {options.max_length} ({fill:.0%} full, {cut} samples cut)",
        f"drafter:  {parameters:,} parameters, {config.drafter.num_layers} layers, block {config.drafter.block_size}, "
        f"taps {list(reader.manifest.target_layer_ids)}",
        f"batch:    {options.batch_size} rows x {options.gradient_accumulation_steps} accumulation x "
        f"{accelerator.num_processes} processes = {schedule.rows_per_step} rows, {options.anchors} anchors a row",
        f"steps:    {start} to {total_steps}, {schedule.steps_per_epoch} an epoch; {options.optimizer} "
        f"{options.learning_rate:g}, {options.precision} arithmetic, {backend(accelerator)}",
        f"folder:   {config.run_dir}",
    ]
    return "\n".join(lines)


def backend(accelerator: Accelerator) -> str:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"]
        return f"DeepSpeed ZeRO-{stage}"
    return str(accelerator.distributed_type.value).lower()


class StopSignal:
    """SIGTERM and Ctrl-C end the run after the step at hand, with a checkpoint. A second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.number = 0
        signal.signal(signal.SIGTERM, self._set)
        signal.signal(signal.SIGINT, self._set)

    def _set(self, number: int, _frame: Any) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    @property
    def requested(self) -> float:
        return float(self.number > 0)

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number else "another process's signal"


if __name__ == "__main__":
    sys.exit(main_guard(main))
