"""One micro-step: blocks laid out, drafter run, loss taken, everything summed that the log divides later."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from configs.schema import Config
from extract.head import TargetHead
from train.batches import Batch
from train.blocks import block_targets, choose_anchors, layer_masks, slot_inputs, valid_anchors
from train.drafter import DFlashDrafter, DraftShape
from train.loss import slot_losses
from train.sampling import StepHead
from train.weighting import decay_weights, default_gamma, dpace_weights


@dataclass
class Prepared:
    """A micro-batch with its blocks laid out. A anchors a row, B block size, S = A*B."""

    batch: Batch
    anchors: Tensor  # [R, A]
    first: int  # the first slot that predicts
    targets: Tensor  # [R, A, B]
    supervised: Tensor  # [R, A, B]
    weights: Tensor | None  # [R, A, B] float32; None: they come from the forward
    divisor: (
        Tensor  # of the summed losses, this micro-batch's share: the sum of weights, or the blocks
    )


def prepare(batch: Batch, config: Config, shape: DraftShape) -> Prepared:
    options = config.train
    valid = valid_anchors(batch.loss_mask, batch.document)
    chosen = choose_anchors(valid, batch.priority, options.anchors)
    targets, supervised = block_targets(
        batch.input_ids, batch.loss_mask, batch.document, chosen, shape
    )
    weights = None
    if options.weighting == "uniform":
        weights = supervised.float()
    elif options.weighting == "decay":
        gamma = options.decay_gamma or default_gamma(shape.block_size)
        weights = decay_weights(supervised, gamma)
    divisor = (chosen >= 0).sum() if weights is None else weights.sum()
    return Prepared(batch, chosen, shape.first, targets, supervised, weights, divisor)


def run_drafter(engine: Any, drafter: DFlashDrafter, head: TargetHead, part: Prepared) -> Tensor:
    """Final hidden states of all slots, [R, S, H]. `engine` is the (wrapped) drafter."""
    batch, shape = part.batch, drafter.shape
    ids, positions = slot_inputs(
        batch.input_ids, batch.position, part.anchors, shape.block_size, shape.mask_token_id
    )
    masks = layer_masks(
        drafter, batch.document, batch.position, part.anchors, sparse=part.anchors.is_cuda
    )
    dtype = drafter.autocast or torch.float32  # of the arithmetic, the residual stream included
    features, embeddings = batch.features.to(dtype), head.embed(ids).to(dtype)
    out: Tensor = engine(features, batch.position, embeddings, positions, masks)
    return out


def loss_of(
    hidden: Tensor, head: TargetHead | StepHead, part: Prepared, config: Config
) -> tuple[Tensor, Tensor]:
    """(sum of weighted losses, correct [R, A, B] bool). Only supervised slots reach the head."""
    shape = part.supervised.shape
    keep = part.supervised.flatten().nonzero()[:, 0]
    teacher = None
    if part.batch.last_hidden is not None:
        rows = torch.arange(len(part.anchors), device=keep.device)[:, None, None]
        offsets = torch.arange(part.targets.shape[2], device=keep.device)
        before = (part.anchors.clamp(min=0)[:, :, None] + offsets - part.first).clamp(
            0, part.batch.input_ids.shape[1] - 1
        )
        teacher = part.batch.last_hidden[rows, before].flatten(0, 2)[keep].to(head.weight.dtype)
    slots = slot_losses(
        hidden.reshape(-1, hidden.shape[-1])[keep],
        head,
        part.targets.flatten()[keep],
        teacher=teacher,
        share=config.train.distillation,
        chunk=config.train.loss_chunk,
    )

    def laid_out(values: Tensor) -> Tensor:
        return values.new_zeros(shape.numel()).index_copy(0, keep, values).view(shape)

    weights = part.weights
    if weights is None:
        weights = dpace_weights(laid_out(slots.confidence), part.supervised)
    numerator = (slots.loss.double() * weights.flatten()[keep]).sum().float()
    return numerator, laid_out(slots.correct)


def step_sums(numerator: Tensor, part: Prepared, correct: Tensor) -> Tensor:
    """What is added over micro-batches, ranks and steps before anything is divided, [4 + 3B]: numerator, divisor, tokens;
    per slot 0..B-1 how many are supervised and how many of them correct; blocks; per slot how many blocks are correct up
    to it. A block that a turn's end cuts short ends there, it is not wrong (field bug F18)."""
    leading = (correct | ~part.supervised).long().cumprod(2).bool() & part.supervised
    blocks = (part.anchors >= 0).sum()
    per_slot = [part.supervised.sum((0, 1)), correct.sum((0, 1)), leading.sum((0, 1))]
    flat = torch.cat(
        [p.double() for p in per_slot[:2]] + [blocks.double()[None], per_slot[2].double()]
    )
    tokens = (part.batch.document >= 0).sum().double()
    head = torch.stack([numerator.detach().double(), part.divisor.double(), tokens])
    return torch.cat([head, flat])


def backward(accelerator: Accelerator, model: Any, loss: Tensor) -> None:
    """Add the gradients of one micro-step. accelerate's own would let DeepSpeed step at once, unseen.

    A loss that is not finite makes all of its gradients so, and with them the norm on every rank.
    """
    loss = loss * torch.where(loss.isfinite(), 1.0, torch.nan)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        model.set_gradient_accumulation_boundary(is_boundary=accelerator.sync_gradients)
        model.backward(loss)
    else:
        accelerator.backward(loss)


def optimizer_step(
    accelerator: Accelerator, model: Any, optimizer: Any, limit: float
) -> tuple[float, bool]:
    """Clip the gradients, step and clear them: (their norm before, whether it is finite), the same on all ranks.

    Without a finite norm nothing but the gradients changes.
    """
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if deepspeed and model.zero_optimization():
        model.step()  # clips by itself, and leaves out a step whose norm is not finite
        norm = float(model.get_global_grad_norm())
        return norm, math.isfinite(norm)
    clip: Any = torch.nn.utils.clip_grad_norm_ if deepspeed else accelerator.clip_grad_norm_
    norm = float(clip(model.parameters(), limit))
    if finite := math.isfinite(norm):
        (model if deepspeed else optimizer).step()
    (model if deepspeed else optimizer).zero_grad()
    return norm, finite
