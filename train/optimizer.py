"""AdamW, or Muon for matrices with AdamW for vectors; and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from configs.schema import TrainConfig


def learning_rate_factor(step: int, total: int, warmup_ratio: float) -> float:
    """Factor on the learning rate of optimizer step `step` (from 0): linear warmup, then a cosine to 0."""
    warmup = round(total * warmup_ratio)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for matrices and torch's AdamW for vectors behind one optimizer's face.

    Muon (Jordan et al. 2024) orthogonalises the momentum of a matrix; `match_rms_adamw` scales its step so that learning
    rates mean what they mean to AdamW (Liu et al. 2025).
    """

    def __init__(
        self, matrices: list[nn.Parameter], vectors: list[nn.Parameter], config: TrainConfig
    ) -> None:
        self.muon = torch.optim.Muon(
            matrices,
            lr=config.learning_rate,
            momentum=config.muon_momentum,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adamw = torch.optim.AdamW(
            vectors,
            lr=config.muon_adamw_learning_rate or config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        # one set of groups: whoever changes a learning rate here changes it there
        self.muon.param_groups = [self.param_groups[0]]
        self.adamw.param_groups = [self.param_groups[1]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch has overloads
        assert closure is None
        self.muon.step()
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of all trainable parameters; nothing of the target is among them."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            parameters,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
    else:
        optimizer = MuonWithAdamW(
            [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2], config
        )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def set_learning_rate(optimizer: Any, factor: float) -> float:
    """Apply the schedule; returns the first group's learning rate, for the log."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])
