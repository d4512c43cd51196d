"""What a training run settles before its first step."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch.distributed import DistError

from configs.load import UserError, first_line
from configs.provenance import fingerprint
from configs.schema import Config
from extract.head import TargetHead
from extract.manifest import MANIFEST, require
from extract.shards import ShardReader
from extract.waiting import POLL_SECONDS, Notice
from extract.window import WindowReader, begun
from train.batches import Schedule, pack
from train.rolling import RollingSchedule, rolling_schedule
from train.sampling import SampledHead
from train.zero import settle, talk_through_gloo

# What may change at a resume. The two factors of the rows per step may, their product may not.
FREE = {
    "batch_size",
    "checkpoint_every",
    "gradient_accumulation_steps",
    "keep_checkpoints",
    "log_every",
    "loss_chunk",
    "nonfinite",
}
# For all processes to come together, and for each step of their talk later on.
MEETING = timedelta(minutes=10)


def make_accelerator(config: Config) -> Accelerator:
    """The accelerator, with the process group that the launcher meant.

    Two silent traps on a CPU: DeepSpeed makes several runs of one process each unless the group is named gloo, and
    plain accelerate does not synchronise gradients unless it is told that this is a CPU run.
    """
    cuda, launched = torch.cuda.is_available(), "WORLD_SIZE" in os.environ
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if deepspeed and not cuda:
        talk_through_gloo()
    group = InitProcessGroupKwargs(backend="nccl" if cuda else "gloo", timeout=MEETING)
    try:
        accelerator = Accelerator(
            cpu=not cuda and not deepspeed,
            gradient_accumulation_steps=config.train.gradient_accumulation_steps,
            kwargs_handlers=[group] if launched else [],
            mixed_precision="no",  # the drafter casts for itself; weights and optimizer state stay float32
        )
    except DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"process {os.environ.get('RANK')} of {world} did not meet the others at {where} ({first_line(error)}); "
            f"start all {world} within {MEETING.seconds} s, with this address, each with a rank of its own"
        ) from None
    if accelerator.num_processes != world:
        raise UserError(
            f"the launcher started {world} processes but this run sees {accelerator.num_processes}"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settle(config, accelerator.state.deepspeed_plugin.deepspeed_config)
    return accelerator


def open_states(config: Config, folder: Path) -> ShardReader | WindowReader:
    """The training states. With a rolling window this waits until extraction has begun."""
    if config.extract.window_gb is None:
        return ShardReader(folder)
    notice = Notice(at_once=True)
    while begun(folder) is None:
        notice.say(f"waiting for extract/main.py to begin in {folder}")
        time.sleep(POLL_SECONDS)
    return WindowReader(folder)


def make_schedule(config: Config, reader: ShardReader | WindowReader, world: int) -> Schedule:
    """What every step works on, for the whole run. UserError when a rolling window is too small for it."""
    options = config.train
    shared = (
        options.epochs,
        options.batch_size,
        options.gradient_accumulation_steps,
        world,
        config.seed,
    )
    if isinstance(reader, WindowReader):
        assert config.extract.window_gb is not None
        return rolling_schedule(
            reader.plan,
            *shared,
            max_length=options.max_length,
            gigabytes=config.extract.window_gb,
            checkpoint_every=options.checkpoint_every,
        )
    return Schedule(pack(reader.lengths, options.max_length), *shared)


def check_states(config: Config, reader: ShardReader | WindowReader, folder: Path) -> None:
    """The states must be what the config says; both values are named."""
    if not reader.lengths:
        raise UserError(
            f"{folder} has no samples: all {len(reader.manifest.quarantined)} were left out, "
            f"see {MANIFEST} for the reasons"
        )
    expected: dict[str, object] = {"storage_dtype": config.extract.storage_dtype}
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


def sampled_head(
    config: Config, reader: ShardReader | WindowReader, head: TargetHead
) -> SampledHead | None:
    """The head of train.head_tokens, or None when the loss uses all of the vocabulary."""
    count = config.train.head_tokens
    if count is None:
        return None
    try:
        return SampledHead(head, reader.token_frequency(len(head.weight)), count, config.seed)
    except ValueError as error:
        raise UserError(f"train.head_tokens={count}: {error}; unset it") from None


def run_identity(config: Config, schedule: Schedule) -> str:
    """What a resumed run must have in common with the interrupted one for its steps to be the same."""
    options = config.train.model_dump(exclude=FREE)
    return fingerprint(
        [
            config.seed,
            config.drafter.model_dump(),
            options,
            *schedule.identity(),
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
    reader: ShardReader | WindowReader,
    total_steps: int,
    start: int,
) -> str:
    options, totals = config.train, reader.totals
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
    if isinstance(schedule, RollingSchedule):
        shards = max(schedule.shards) + 1
        lines.insert(
            1,
            f"window:   {config.extract.window_gb:g} of {totals.bytes / 1e9:.3g} GB at a time; a step's rows come from "
            f"{min(shards, schedule.spread * schedule.epochs)} neighbouring shards of {shards}",
        )
    return "\n".join(lines)


def backend(accelerator: Accelerator) -> str:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"]
        return f"DeepSpeed ZeRO-{stage}"
    return "DDP" if accelerator.num_processes > 1 else "one process"
