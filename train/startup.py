"""What a training run settles before its first step, and the signals that end it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from configs.load import UserError
from configs.provenance import fingerprint
from configs.schema import Config
from extract.head import TargetHead
from extract.manifest import require
from extract.shards import ShardReader
from train.batches import Schedule
from train.sampling import SampledHead, token_frequency


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
