"""What a logged step says: sums over steps, micro-batches and ranks, divided once."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
import torch._dynamo.utils
from torch import Tensor

from train.drafter import DraftShape


class Window:
    """Sums since the last logged step, over the steps that were not skipped."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.norm = 0.0  # of the last step
        self.skipped = 0
        self.started = time.perf_counter()
        self.data_seconds = 0.0

    def add(self, sums: Tensor, norm: float = 0.0) -> None:
        self.sums = sums.clone() if self.sums is None else self.sums + sums
        self.norm = norm

    def loss_and_tau(self, block: int) -> tuple[float, float]:
        """Loss per unit of weight, with D-PACE per block, and 1 + the leading correct drafts of the mean block."""
        assert self.sums is not None
        numerator, divisor, _, *rest = self.sums.tolist()
        blocks, leading = rest[2 * block], rest[2 * block + 1 :]
        return numerator / max(divisor, 1e-9), 1 + sum(leading) / max(blocks, 1)

    def line(self, step: int, epoch: int, lr: float, shape: DraftShape) -> dict[str, Any]:
        """The metrics.jsonl line, for a window with at least one step.

        `tau_proxy` is an estimate, because decoding visits other anchors than the drawn ones (eval has the real tau).
        `data_wait` is the share of the time in which the main process waited for data. `tokens` is the window's sum,
        `lr` and `grad_norm` are its last step's.
        """
        assert self.sums is not None
        block = shape.block_size
        loss, tau = self.loss_and_tau(block)
        _, _, tokens, *rest = self.sums.tolist()
        supervised, correct = rest[:block], rest[block : 2 * block]
        seconds = time.perf_counter() - self.started
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _peak_rss()
        return {
            "step": step,
            "epoch": epoch,
            "tokens": int(tokens),
            "loss": loss,
            "accuracy": sum(correct) / max(sum(supervised), 1),
            "accuracy_at_position": [
                c / max(s, 1)
                for c, s in zip(correct[shape.first :], supervised[shape.first :], strict=True)
            ],
            "tau_proxy": tau,
            "lr": lr,
            "grad_norm": self.norm,
            "skipped_steps": self.skipped,
            "tokens_per_second": tokens / seconds,
            "slots_per_second": sum(supervised) / seconds,
            "data_wait": self.data_seconds / seconds,
            "seconds": seconds,
            "compiled_graphs": compiled_graphs(),
            "peak_memory_bytes": peak,
        }


def compiled_graphs() -> int:
    """Graphs that torch.compile has made so far. It stands still after the first step and the first
    held-out measurement, or shapes are not constant."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def terminal_line(line: dict[str, Any], total: int) -> str:
    return (
        f"step {line['step']}/{total} epoch {line['epoch']} loss {line['loss']:.4f} acc {line['accuracy']:.3f} "
        f"tau~{line['tau_proxy']:.2f} lr {line['lr']:.2e} norm {line['grad_norm']:.2f} "
        f"{line['tokens_per_second']:.0f} tok/s {line['slots_per_second']:.0f} slots/s "
        f"mem {line['peak_memory_bytes'] / 2**30:.1f}G"
    )
