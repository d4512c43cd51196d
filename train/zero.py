"""DeepSpeed's config: what is filled in, what is refused because it would win over ours, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from configs.load import UserError
from configs.provenance import atomic_write_json
from configs.schema import Config

RESOLVED = "deepspeed.json"


def settle(config: Config, settings: dict[str, Any]) -> None:
    """Fill DeepSpeed's settings in, in place. UserError, with the fix, for those that contradict the experiment's."""
    wanted = config.train.gradient_accumulation_steps
    given = settings.get("gradient_accumulation_steps", "auto")
    if given not in ("auto", wanted):
        raise UserError(
            f"train.gradient_accumulation_steps is {wanted} but the DeepSpeed config says {given}; "
            "set that one to auto"
        )
    for section in ("optimizer", "scheduler"):
        if given := settings.get(section):
            raise UserError(
                f"the DeepSpeed config has a section {section} ({given.get('type')}), which would take the place of "
                f"train.optimizer={config.train.optimizer} and its schedule; remove that section"
            )
    zero = settings["zero_optimization"]
    for part in ("offload_optimizer", "offload_param"):
        if (device := (zero.get(part) or {}).get("device", "none")) != "none":
            raise UserError(
                f"the DeepSpeed config has {part} on {device}, for which DeepSpeed compiles an Adam of its own that "
                f"replaces train.optimizer={config.train.optimizer}; set it to none, with a higher ZeRO stage or "
                "more processes"
            )
    if config.train.optimizer == "muon" and zero["stage"] > 0:
        raise UserError(
            f"train.optimizer=muon needs whole matrices and ZeRO stage {zero['stage']} cuts them up; use ZeRO stage 0, "
            "plain accelerate launch, or adamw"
        )
    settings.update(
        train_micro_batch_size_per_gpu=config.train.batch_size,
        gradient_accumulation_steps=wanted,
        # without ZeRO the loop clips, see train.step.optimizer_step
        gradient_clipping=config.train.max_grad_norm if zero["stage"] else 0.0,
        zero_allow_untested_optimizer=True,
    )
    for key in ("bf16", "fp16", "train_batch_size"):
        settings.pop(key, None)


def need_no_compiler() -> None:
    """Let CPU processes talk through gloo alone.

    DeepSpeed otherwise builds a shared-memory reduction at the start. It fails there without a compiler or ninja, and a
    run that is killed while it builds leaves a lock in ~/.cache/torch_extensions at which every later one waits for ever.
    """
    import deepspeed
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False


def save_resolved(run_dir: Path, accelerator: Accelerator) -> None:
    """Write deepspeed.json, what DeepSpeed was given in the end, beside config.yaml; no `auto` is left in it."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED and accelerator.is_main_process:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        # accelerate silences DeepSpeed's own log with an infinity, which JSON cannot say
        atomic_write_json(
            run_dir / RESOLVED, {k: v for k, v in settings.items() if k != "steps_per_print"}
        )
