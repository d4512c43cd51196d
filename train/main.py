"""Train a DFlash drafter on extracted states.

    accelerate launch train/main.py --config configs/smollm2-demo.yaml
    accelerate launch --config_file configs/accelerate/zero2.yaml train/main.py --config configs/qwen3-8b.yaml --resume

The loop below is in the order in which things happen. What step s works on (rows, anchors) is a function of the seed
and s alone, so a resumed run continues the interrupted one exactly.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from configs.load import UserError, add_arguments, config_from_args, main_guard
from configs.provenance import FolderLock, open_run_dir
from configs.schema import Config
from extract.head import load_head
from extract.shards import ShardReader
from extract.window import WindowReader
from train import export
from train.batches import StepDataset, step_batches
from train.build import build_drafter
from train.card import model_card
from train.checkpoint import (
    checkpoint_interval,
    load_checkpoint,
    save_checkpoint,
    trainer_state,
)
from train.drafter import DFlashDrafter
from train.finished import complete_checkpoints
from train.held_out import held_out
from train.log import Window, terminal_line
from train.nonfinite import report_nonfinite
from train.optimizer import learning_rate_factor, make_optimizer, set_learning_rate
from train.rolling import Arrivals
from train.signals import StopSignal
from train.startup import (
    check_states,
    make_accelerator,
    make_schedule,
    open_states,
    require_same_run,
    run_identity,
    sampled_head,
    summary,
)
from train.step import backward, loss_of, optimizer_step, prepare, run_drafter, step_sums
from train.tracking import Tracker
from train.zero import save_resolved


def main(argv: Sequence[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["export"], ["push"]):
        return export.main(argv)
    args = parser().parse_args(argv)
    config = config_from_args(args)
    run_dir = Path(config.run_dir)

    checkpoints = complete_checkpoints(run_dir)
    if checkpoints and not args.resume:
        raise UserError(
            f"{run_dir} has {len(checkpoints)} checkpoints; add --resume or choose another run_dir"
        )
    latest = checkpoints[-1] if checkpoints else None
    reader = open_states(config, run_dir / "states")
    check_states(config, reader, run_dir / "states")

    accelerator = make_accelerator(config)
    main_process = accelerator.is_main_process
    if not main_process:
        return train(config, run_dir, reader, accelerator, latest, args.config)
    with FolderLock(run_dir, "train"):
        open_run_dir(config, stage="train", resume=True)
        return train(config, run_dir, reader, accelerator, latest, args.config)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="train/main.py",
        description="Train a DFlash drafter on extracted states. `export` and `push`, with a --help of their own, hand "
        "a checkpoint on.",
        epilog="example: accelerate launch train/main.py --config configs/smollm2-demo.yaml",
    )
    add_arguments(out)
    out.add_argument(
        "--resume", action="store_true", help="go on from the latest complete checkpoint"
    )
    return out


def train(
    config: Config,
    run_dir: Path,
    reader: ShardReader | WindowReader,
    accelerator: Accelerator,
    latest: Path | None,
    config_file: str,
) -> int:
    options, device = config.train, accelerator.device
    manifest, main_process = reader.manifest, accelerator.is_main_process

    # What every step works on, for the whole run.
    schedule = make_schedule(config, reader, accelerator.num_processes)
    total_steps = options.max_steps or schedule.total_steps
    every = checkpoint_interval(options.checkpoint_every, total_steps)

    # The drafter alone goes into the engine; the target's embedding and head stay outside, frozen.
    model: Any = build_drafter(config, manifest)
    model.autocast = torch.bfloat16 if options.precision == "bf16" else None
    parameters = sum(p.numel() for p in model.parameters())
    optimizer: Any = make_optimizer(model, options)
    model, optimizer = accelerator.prepare(model, optimizer)
    save_resolved(run_dir, accelerator)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    drafter: DFlashDrafter = accelerator.unwrap_model(model)
    head = load_head(run_dir / "states", device=device, dtype=dtype).used_by(drafter.shape)
    sampled = sampled_head(config, reader, head)

    start = 0
    if latest is not None:
        identity = trainer_state(latest)
        require_same_run(identity, config, schedule, latest)
        load_checkpoint(latest, accelerator, model, optimizer)
        start = identity["step"]
    stop = StopSignal()
    arrivals = Arrivals(reader, schedule, accelerator, stop, start)
    if start >= total_steps:
        accelerator.print(f"training is complete: {latest} is step {start} of {total_steps}")
        return 0
    accelerator.print(
        summary(config, schedule, parameters, accelerator, reader, total_steps, start)
    )

    tracker = Tracker(run_dir, config, stage="train", resume_step=start) if main_process else None
    dataset = StepDataset(
        reader, schedule, rank=accelerator.process_index, max_length=options.max_length,
        last_hidden=options.distillation > 0,
    )  # fmt: skip
    batches = step_batches(dataset, start, total_steps, workers=2 if device.type == "cuda" else 0)
    held = held_out(config, manifest, accelerator, total_steps)
    window = Window()
    done, skips = start, 0

    def save() -> None:
        if done == start:
            return  # stopped before the first step
        folder = save_checkpoint(
            run_dir,
            accelerator,
            model,
            optimizer,
            step=done,
            card=model_card(config, manifest, reader.totals, done, drafter),
            trainer={"identity": run_identity(config, schedule), "total_steps": total_steps},
            keep=options.keep_checkpoints,
        )
        accelerator.print(f"checkpoint: {folder}")
        arrivals.release(done)

    for step in range(start, total_steps):
        # 0. This step's micro-batches. With a rolling window, extraction may still be at work on its states.
        waiting = time.perf_counter()
        if not arrivals.wait(step):
            save()
            break
        batches_of_step = next(batches)
        window.data_seconds += time.perf_counter() - waiting

        # 1. Their anchors, and the global divisor of their summed losses.
        micro = [prepare(batch.to(device), config, drafter.shape) for batch in batches_of_step]
        divisor = accelerator.reduce(
            torch.stack([m.divisor for m in micro]).sum().double(), "sum"
        ).clamp(min=1e-9)

        # 2. Forward and backward. Gradients are averaged over ranks and divided by the accumulation steps later on, so
        #    both are multiplied in: one step is the same for any split of its rows.
        lr = set_learning_rate(
            optimizer, learning_rate_factor(step, total_steps, options.warmup_ratio)
        )
        loss_head = sampled.at(step) if sampled else head
        scale = accelerator.num_processes * options.gradient_accumulation_steps / divisor
        sums = torch.zeros(5 + 3 * drafter.shape.block_size, dtype=torch.float64, device=device)
        losses = []
        for part in micro:
            with accelerator.accumulate(model):
                hidden = run_drafter(model, drafter, head, part)
                numerator, correct = loss_of(hidden, loss_head, part, config)
                backward(accelerator, model, numerator * scale.float())
            sums[:-1] += step_sums(numerator, part, correct)
            losses.append(numerator.detach())

        # 3. The optimizer's step, unless a NaN or an Inf came from any rank.
        norm, finite = optimizer_step(accelerator, model, optimizer, options.max_grad_norm)
        sums[-1] = stop.requested  # any rank's signal stops all of them
        sums = accelerator.reduce(sums, "sum")
        done = step + 1
        if finite:
            window.add(sums[:-1], norm)
            skips = 0
        else:
            skips += 1
            window.skipped += 1
            report_nonfinite(
                accelerator, micro, losses,
                step=done, norm=norm, skip=options.nonfinite == "skip", skips=skips,
            )  # fmt: skip

        # 4. The log.
        stopping = bool(sums[-1] > 0)
        scheduled = done % every == 0 or done == total_steps
        due = done % options.log_every == 0 or scheduled or stopping
        if due and window.sums is not None:  # None: all were skipped, and the window stays open
            epoch = step // schedule.steps_per_epoch
            line = window.line(done, epoch, lr, drafter.shape)
            if held and (scheduled or done % held.every == 0):
                line |= held.values(model, head)
            if tracker:
                tracker.log(line)
                print(terminal_line(line, total_steps), flush=True)
            window = Window()

        # 5. The checkpoint.
        if scheduled or stopping:
            save()
        if stopping:
            break
    if tracker:
        tracker.close()
    finished = done == total_steps
    if not finished:
        accelerator.print(
            f"stopped by {stop.name} at step {done}; add --resume to the same command to go on"
        )
    else:
        accelerator.print(
            f"next: python eval/main.py --config {config_file} --checkpoint all --mode replay"
        )
    accelerator.end_training()
    return 0 if finished else 128 + (stop.number or signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main_guard(main))
