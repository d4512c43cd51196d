"""A small held-out measurement inside the training: one step's worth of rows of a held-out set, forward only.

The rows and their anchors are those of step 0 of an epoch over that set, so they stay the same for the whole run and for
any split over processes, and the shapes are those of training. Nothing is drawn and no gradient is taken: training is the
same with and without it, to the bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from configs.schema import Config
from extract.head import TargetHead
from extract.manifest import Manifest, held_out_folders, is_complete, require
from extract.shards import ShardReader
from train.batches import Schedule, StepDataset, pack
from train.log import Window
from train.step import loss_of, prepare, run_drafter, step_sums

TIMES = 20  # a run, beside once at every checkpoint


class HeldOut:
    """`values` is a collective call. The loss is the objective's cross-entropy over all of the vocabulary."""

    def __init__(
        self, config: Config, reader: ShardReader, accelerator: Accelerator, total_steps: int
    ) -> None:
        options = config.train
        self.config = config.model_copy(
            update={"train": options.model_copy(update={"distillation": 0.0})}
        )
        self.accelerator = accelerator
        schedule = Schedule(
            pack(reader.lengths, options.max_length),
            1,
            options.batch_size,
            options.gradient_accumulation_steps,
            accelerator.num_processes,
            config.seed,
        )
        self.data = StepDataset(
            reader,
            schedule,
            rank=accelerator.process_index,
            max_length=options.max_length,
            last_hidden=False,
        )
        # a multiple of log_every, so that these lines are logged anyway
        self.every = math.ceil(total_steps / TIMES / options.log_every) * options.log_every

    @torch.no_grad()
    def values(self, model: Any, head: TargetHead) -> dict[str, float]:
        drafter, device = self.accelerator.unwrap_model(model), self.accelerator.device
        window = Window()
        for batch in self.data[0]:
            part = prepare(batch.to(device), self.config, drafter.shape)
            hidden = run_drafter(model, drafter, head, part)
            numerator, correct = loss_of(hidden, head, part, self.config)
            window.add(step_sums(numerator, part, correct))
        assert window.sums is not None
        window.sums = self.accelerator.reduce(window.sums, "sum")
        loss, tau = window.loss_and_tau(drafter.shape.block_size)
        return {"held_out_loss": loss, "held_out_tau_proxy": tau}


def held_out(
    config: Config, manifest: Manifest, accelerator: Accelerator, total_steps: int
) -> HeldOut | None:
    """On the first set of eval.prompts that is complete by now; None without one. All ranks call this together.

    UserError when its states are of another target than those of training.
    """
    chosen = [next(filter(is_complete, held_out_folders(config).values()), None)]
    broadcast_object_list(chosen)  # extraction may be finishing one just now
    if chosen[0] is None:
        return None
    reader = ShardReader(chosen[0])
    require(
        reader.manifest,
        chosen[0],
        target_layer_ids=manifest.target_layer_ids,
        **{"target.fingerprint": manifest.target.fingerprint},
    )
    return HeldOut(config, reader, accelerator, total_steps)
