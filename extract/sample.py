"""A sample with its hidden states: its tensors, how a shard lays them out, what makes one unfit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from extract.manifest import Manifest

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CODES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
PER_TOKEN = ("input_ids", "hidden_states", "last_hidden", "loss_mask")
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Sample:
    id: str
    input_ids: Tensor  # int32 [T]
    loss_mask: Tensor  # uint8 [T]
    hidden_states: Tensor  # [T, n_taps*hidden]
    last_hidden: Tensor | None  # [T, hidden]


@dataclass(frozen=True)
class Format:
    """What the shards of a folder have in common."""

    num_taps: int
    hidden: int
    dtype: torch.dtype
    last_hidden: bool

    @classmethod
    def of(cls, manifest: Manifest) -> Format:
        taps, dtype = len(manifest.target_layer_ids), DTYPES[manifest.storage_dtype]
        return cls(taps, manifest.hidden_size, dtype, manifest.last_hidden)

    def layout(self, samples: int, tokens: int) -> Layout:
        """Dtype and shape of each tensor, in file order: wide elements first, to align them."""
        layout: Layout = {
            "offsets": (torch.int64, (samples + 1,)),
            "input_ids": (torch.int32, (tokens,)),
            "hidden_states": (self.dtype, (tokens, self.num_taps * self.hidden)),
        }
        if self.last_hidden:
            layout["last_hidden"] = (self.dtype, (tokens, self.hidden))
        layout["loss_mask"] = (torch.uint8, (tokens,))
        return layout


def estimate_bytes(
    tokens: int, num_taps: int, hidden: int, dtype: torch.dtype, last_hidden: bool
) -> int:
    """Return the size of so many stored tokens; headers and offsets are not worth counting."""
    layout = Format(num_taps, hidden, dtype, last_hidden).layout(0, tokens)
    return sum(math.prod(layout[n][1]) * layout[n][0].itemsize for n in PER_TOKEN if n in layout)


def defect_of(sample: Sample, form: Format) -> str | None:
    """Say what makes a sample unfit for training, if anything does."""
    tokens = len(sample.input_ids)
    layout = form.layout(1, tokens)
    for name in PER_TOKEN:
        tensor, wanted = getattr(sample, name), list(layout.get(name, (None, ()))[1])
        found = [] if tensor is None else list(tensor.shape)
        if found != wanted:
            return f"{name} has shape {found} and {tokens} tokens need {wanted}"
    if not tokens:
        return "it has no tokens"
    if int(sample.loss_mask.max()) != 1:
        return "loss_mask must be 0 or 1, and 1 for at least one token"
    for name, taps in (("hidden_states", form.num_taps), ("last_hidden", 1)):
        states: Tensor | None = getattr(sample, name)
        if states is None:
            continue
        peak = states.reshape(tokens, taps, -1).abs().amax(-1)  # [T, taps], NaN wins
        bad = (peak.isfinite() & (peak > 0)).logical_not().nonzero().tolist()
        if bad:
            token, tap = bad[0]
            what = "only zeros" if peak[token, tap] == 0 else "NaN or Inf"
            return f"{name} has {what} in token {token}, tap number {tap}"
    return None
