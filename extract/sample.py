"""A sample with its hidden states: its tensors, how a shard lays them out, what makes one unfit.

float8_e4m3fn halves the disk. The scale of a token and tap is its largest |x| / 448: the outlier channels, up to hundreds
of times the median, set it and stay exact, and all values down to 1/28,672 of them keep four significant bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from extract.manifest import Manifest
from extract.target import DTYPES

FLOAT8 = torch.float8_e4m3fn
STORAGE_DTYPES = DTYPES | {"float8_e4m3fn": FLOAT8}
CODES = {
    FLOAT8: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
# The value of each byte. Looking them up is several times faster than PyTorch's cast on a CPU.
FLOAT8_VALUES = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
FIELDS = ("input_ids", "hidden_states", "last_hidden", "loss_mask")
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Sample:
    id: str
    input_ids: Tensor  # int32 [T]
    loss_mask: Tensor  # uint8 [T]
    hidden_states: Tensor  # [T, n_taps*hidden]
    last_hidden: Tensor | None  # [T, hidden]

    @property
    def prompt_tokens(self) -> int:
        """Where the answer begins, in a sample of one turn: all that is supervised stands at the end."""
        return len(self.input_ids) - int(self.loss_mask.sum())


@dataclass(frozen=True)
class Format:
    """What the shards of a folder have in common."""

    num_taps: int
    hidden: int
    dtype: torch.dtype  # of hidden_states in the file
    last_hidden: bool

    @classmethod
    def of(cls, manifest: Manifest) -> Format:
        taps, dtype = len(manifest.target_layer_ids), STORAGE_DTYPES[manifest.storage_dtype]
        return cls(taps, manifest.hidden_size, dtype, manifest.last_hidden)

    @property
    def sample_dtype(self) -> torch.dtype:
        """Of the states of a sample that was read: float8 and its scales come back as bfloat16."""
        return torch.bfloat16 if self.dtype == FLOAT8 else self.dtype

    def layout(self, samples: int, tokens: int) -> Layout:
        """Dtype and shape of each tensor, in file order: wide elements first, to align them."""
        layout: Layout = {
            "offsets": (torch.int64, (samples + 1,)),
            "input_ids": (torch.int32, (tokens,)),
            "hidden_states": (self.dtype, (tokens, self.num_taps * self.hidden)),
        }
        if self.dtype == FLOAT8:
            layout["scales"] = (torch.float32, (tokens, self.num_taps))
        if self.last_hidden:
            layout["last_hidden"] = (self.sample_dtype, (tokens, self.hidden))
        layout["loss_mask"] = (torch.uint8, (tokens,))
        return dict(sorted(layout.items(), key=lambda item: -item[1][0].itemsize))

    def encode(self, sample: Sample) -> dict[str, Tensor]:
        """The tensors of a sample as the file has them."""
        tensors = {name: t for name in FIELDS if (t := getattr(sample, name)) is not None}
        if "last_hidden" in tensors:
            tensors["last_hidden"] = tensors["last_hidden"].to(self.sample_dtype)
        if self.dtype == FLOAT8:
            by_tap = sample.hidden_states.float().unflatten(-1, (self.num_taps, self.hidden))
            # Below the smallest normal number a scale loses bits, and at last it would be zero.
            smallest = torch.finfo(torch.float32).tiny
            scales = (by_tap.abs().amax(-1) / torch.finfo(FLOAT8).max).clamp(min=smallest)
            tensors["scales"] = scales
            tensors["hidden_states"] = (by_tap / scales[..., None]).flatten(-2).to(FLOAT8)
        else:
            tensors["hidden_states"] = sample.hidden_states.to(self.dtype)
        return tensors

    def decode(self, name: str, tensors: Mapping[str, Tensor]) -> Sample:
        """The sample called `name` from its tensors in the file."""
        fields: dict[str, Any] = {field: tensors.get(field) for field in FIELDS}
        if self.dtype == FLOAT8:
            numbers = tensors["hidden_states"].view(torch.uint8).flatten().int()
            by_tap = FLOAT8_VALUES.index_select(0, numbers).view(-1, self.num_taps, self.hidden)
            states = by_tap.mul_(tensors["scales"][..., None])
            fields["hidden_states"] = states.flatten(-2).to(self.sample_dtype)
        return Sample(name, **fields)


def estimate_bytes(
    tokens: int, num_taps: int, hidden: int, dtype: torch.dtype, last_hidden: bool
) -> int:
    """Return the size of so many stored tokens; headers and offsets are not worth counting."""
    layout = Format(num_taps, hidden, dtype, last_hidden).layout(0, tokens)
    del layout["offsets"]
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())


def defect_of(sample: Sample, form: Format) -> str | None:
    """Say what makes a sample unfit for training, if anything does."""
    tokens = len(sample.input_ids)
    layout = form.layout(1, tokens)
    for name in FIELDS:
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
