"""The target's embedding and head, as one small file beside the shards.

Training and replay need nothing else of the target, so extraction writes them once and no later stage loads the model
(`states/target_head.safetensors`; 57 MB for SmolLM2, 2.5 GB for an 8B). The file says how they are used: whether the
head is tied to the embedding, the embedding's scale and the final soft cap.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from configs.load import UserError
from configs.provenance import file_sha256
from extract.manifest import MANIFEST, read_manifest
from extract.target import Target

FILE = "target_head.safetensors"


class Use(Protocol):
    """How a drafter uses the tables (train.drafter.DraftShape)."""

    @property
    def input_embedding_scale(self) -> float: ...
    @property
    def output_multiplier(self) -> float: ...
    @property
    def final_logit_softcapping(self) -> float | None: ...


class TargetHead:
    """Frozen embedding and head. Never part of the drafter, the engine or a checkpoint."""

    def __init__(
        self,
        embedding: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        self.embedding, self.weight, self.bias = embedding, weight, bias
        self.scale, self.soft_cap = scale, soft_cap

    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., H]"""
        return self.embedding[ids] * self.scale if self.scale != 1.0 else self.embedding[ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V], in the head's dtype."""
        return self.logits_with_slope(hidden)[0]

    def logits_with_slope(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits and, under a soft cap, d(logits)/d(uncapped logits)."""
        out = torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        if self.soft_cap is None:
            return out, None
        ratio = torch.tanh(out / self.soft_cap)
        return ratio * self.soft_cap, 1 - ratio * ratio

    def tensors(self) -> dict[str, Tensor]:
        """What is stored of it; a tied head is stored once."""
        named = {"embedding": self.embedding, "bias": self.bias}
        if self.weight is not self.embedding:
            named["weight"] = self.weight
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]

    def from_logits(self, gradient: Tensor) -> Tensor:
        """A gradient with respect to logits [N, V] -> with respect to hidden [N, H]."""
        return gradient @ self.weight

    def used_by(self, drafter: Use) -> TargetHead:
        """The same tables with a drafter's own scale and soft cap in place of the target's.

        UserError for a drafter whose logits have a factor while the head has a bias: the factor is applied to the hidden
        state, which a bias is not part of.
        """
        if self.bias is not None and drafter.output_multiplier != 1.0:
            raise UserError(
                f"the drafter multiplies its logits by {drafter.output_multiplier:g} (output_multiplier) and the "
                "target's head has a bias, which is not supported together"
            )
        return TargetHead(
            self.embedding,
            self.weight,
            bias=self.bias,
            scale=drafter.input_embedding_scale,
            soft_cap=drafter.final_logit_softcapping,
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TargetHead:
        """The same head elsewhere; a tied head stays one tensor."""
        embedding = self.embedding.to(device, dtype)
        tied = self.weight is self.embedding
        return TargetHead(
            embedding,
            embedding if tied else self.weight.to(device, dtype),
            bias=None if self.bias is None else self.bias.to(device, dtype),
            scale=self.scale,
            soft_cap=self.soft_cap,
        )


def read_use(folder: Path) -> tuple[float, float | None]:
    """How a states folder's target uses its tables: (scale of the embedding, soft cap of the logits). UserError as
    load_head, but for the bytes, which are not looked at."""
    with _opened(folder / FILE) as file:
        return _use(file)


def _use(file: Any) -> tuple[float, float | None]:
    use = json.loads(file.metadata()["use"])
    return float(use["scale"]), None if use["soft_cap"] is None else float(use["soft_cap"])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open file; whatever its reader stumbles over is a UserError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (
        SafetensorError, OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError
    ) as error:  # fmt: skip
        raise UserError(
            f"cannot read {path} ({error}); run extract again, it rewrites the file"
        ) from error


def head_of(target: Target) -> TargetHead:
    """The head of a loaded target. UserError when its embedding is more than a scaled table look-up."""
    table = target.embed.weight
    probe = torch.arange(min(8, table.shape[0]), device=table.device)
    with torch.no_grad():
        embedded, rows = target.embed(probe), table[probe]
    norm = rows.float().norm(dim=-1)
    scale = float((embedded.float().norm(dim=-1) / norm)[norm > 0].median())
    scale = 1.0 if abs(scale - 1) < 1e-3 else scale
    if not torch.allclose(embedded.float(), rows.float() * scale, rtol=2e-2, atol=1e-4):
        raise UserError(
            f"the embedding of {target.label} is not a scaled table look-up, which is not supported"
        )
    tied = target.head.weight is table or target.head.weight.data_ptr() == table.data_ptr()
    embedding = table.detach()
    return TargetHead(
        embedding,
        embedding if tied else target.head.weight.detach(),
        bias=getattr(target.head, "bias", None),
        scale=scale,
        soft_cap=getattr(target.config, "final_logit_softcapping", None),
    )


def save_head(head: TargetHead, folder: Path, dtype: torch.dtype) -> dict[str, str]:
    """Write the file (atomically); returns what the manifest keeps of it. OSError as writing does."""
    tensors = {k: v.to("cpu", dtype).contiguous() for k, v in head.tensors().items()}
    # A folder, since safetensors itself writes to a file of a name that nobody knows and a killed process leaves it.
    temporary = folder / ".target_head.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_file(
            tensors,
            temporary / FILE,
            # One entry: safetensors writes several in an order that differs from call to call.
            metadata={"use": json.dumps({"scale": head.scale, "soft_cap": head.soft_cap})},
        )
        (temporary / FILE).chmod(0o644)  # safetensors leaves it to its owner alone
        with (temporary / FILE).open("rb+") as f:
            os.fsync(f.fileno())
        (temporary / FILE).replace(folder / FILE)
    except SafetensorError as error:
        # It says what the system said as text: "I/O error: No space left on device (os error 28)".
        if not (number := re.search(r"os error (\d+)", str(error))):
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(folder / FILE)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {"file": FILE, "sha256": file_sha256(folder / FILE)}


def load_head(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> TargetHead:
    """Read it back. UserError when it is missing, damaged, or not the one that the manifest beside it names."""
    with _opened(folder / FILE) as file:
        _require_named(folder / FILE)
        names = set(file.keys())
        embedding = file.get_tensor("embedding")
        weight = file.get_tensor("weight") if "weight" in names else embedding
        bias = file.get_tensor("bias") if "bias" in names else None
        scale, soft_cap = _use(file)
    head = TargetHead(embedding, weight, bias=bias, scale=scale, soft_cap=soft_cap)
    return head.to(device, dtype)


def _require_named(file: Path) -> None:
    """ValueError when the bytes are not those in the manifest, if there is one: every logit hangs on them."""
    if not (file.parent / MANIFEST).exists():
        return
    named = read_manifest(file.parent, incomplete_ok=True).target_head
    if named is not None and (found := file_sha256(file)) != named.sha256:
        raise ValueError(f"its sha256 is {found[:12]} and the manifest says {named.sha256[:12]}")
