"""Hidden states on disk: shards that a kill cannot tear, and their reader.

    for shard in owned(plan(lengths, shard_tokens=65536, batch_tokens=8192), rank, world):
        if shard_done(folder, shard, fingerprint) is None:
            write_shard(folder, shard, samples, ...)
    reader = ShardReader(folder)    # once extract.manifest.write_manifest has said `complete`

A shard is a ragged safetensors file. N samples follow each other without padding in T rows:

    offsets        int64 [N+1]       sample i has the rows offsets[i] .. offsets[i+1]
    input_ids      int32 [T]         row t of every tensor is about the same token
    hidden_states  [T, n_taps*hidden] in the storage dtype, taps in the manifest's order
    scales         float32 [T, n_taps]  with float8_e4m3fn only, which they multiply
    last_hidden    [T, hidden]       the final normed state, optional; bfloat16 with float8_e4m3fn
    loss_mask      uint8 [T]         1 where the token is supervised
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.load import UserError
from configs.provenance import atomic_write_json, file_sha256
from extract.manifest import AGAIN, SCHEMA, Quarantined, ShardEntry, Totals, read_manifest
from extract.plan import ShardPlan, owned, plan
from extract.sample import CODES, Format, Sample, defect_of, estimate_bytes

__all__ = [
    "Sample",
    "Shard",
    "ShardPlan",
    "ShardReader",
    "estimate_bytes",
    "noted",
    "open_shard",
    "owned",
    "plan",
    "recorded",
    "shard_done",
    "verify",
    "write_shard",
]

MAX_OPEN_SHARDS = 8


def write_shard(
    folder: Path,
    plan: ShardPlan,
    samples: Sequence[Sample],
    *,
    num_taps: int,
    storage_dtype: torch.dtype,
    plan_fingerprint: str,
) -> ShardEntry:
    """Check the samples of plan.samples, in that order, store them and return the shard's entry.

    A sample that must not be trained on is left out and named in the entry (`quarantined`).

    The shard appears under its name when all of it is on the disk and reads back; its sidecar, the
    mark that shard_done looks for, comes last. A failure leaves nothing of this attempt, a kill at
    most a temporary file that the next attempt replaces. plan_fingerprint stands for everything
    that the content depends on.

    Raises UserError when the disk returns other bytes, and OSError as writing does.
    """
    assert len(samples) == len(plan.samples) > 0
    last_hidden = samples[0].last_hidden is not None
    hidden = samples[0].hidden_states.shape[1] // num_taps
    form = Format(num_taps, hidden, storage_dtype, last_hidden)
    checked = [_to_storage(sample, form) for sample in samples]
    quarantined = tuple(one for one in checked if isinstance(one, Quarantined))
    stored = [one for one in checked if not isinstance(one, Quarantined)]
    kept = [s for s, one in zip(samples, checked, strict=True) if not isinstance(one, Quarantined)]
    path, temporary = folder / plan.name, folder / f".{plan.name}.tmp"
    for stale in folder.glob(f".{path.stem}.*"):
        stale.unlink()
    made = [temporary]
    try:
        entry = _write(temporary, plan.name, kept, stored, form, plan_fingerprint)
        entry = entry.model_copy(update={"quarantined": quarantined})
        if file_sha256(temporary) != entry.sha256:
            raise UserError(f"{path} does not read back as written; check the disk and {AGAIN}")
        open_shard(temporary, entry, form)
        temporary.replace(path)
        made = [path, _sidecar(path)]
        # This also flushes the folder, and with it the new name of the shard.
        atomic_write_json(_sidecar(path), entry.model_dump())
    except BaseException as error:
        for part in made:
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    return entry


def _write(
    path: Path,
    name: str,
    samples: Sequence[Sample],
    stored: Sequence[Mapping[str, Tensor]],
    form: Format,
    plan_fingerprint: str,
) -> ShardEntry:
    """Stream the samples into a safetensors file: its own writer would need a second copy."""
    lengths = [len(sample.input_ids) for sample in samples]
    layout = form.layout(len(samples), sum(lengths))
    header: dict[str, object] = {
        "__metadata__": {"schema": str(SCHEMA), "ids": json.dumps([s.id for s in samples])}
    }
    end = 0
    for key, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        span = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
        header[key] = span
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[Any]:
        yield struct.pack("<Q", len(text)) + text
        yield _bytes(torch.tensor([0, *accumulate(lengths)]))
        for key in list(layout)[1:]:
            for tensors in stored:
                yield _bytes(tensors[key])

    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts():
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    return ShardEntry(
        file=name,
        samples=len(samples),
        tokens=sum(lengths),
        supervised_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
        bytes=8 + len(text) + end,
        sha256=digest.hexdigest(),
        plan_fingerprint=plan_fingerprint,
    )


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _sidecar(shard: Path) -> Path:
    return shard.with_suffix(".json")


def _to_storage(sample: Sample, form: Format) -> dict[str, Tensor] | Quarantined:
    assert (sample.input_ids.dtype, sample.loss_mask.dtype) == (torch.int32, torch.uint8)
    if defect := defect_of(sample, form):
        return Quarantined(id=sample.id, reason=defect)
    stored = form.encode(sample)
    if form.dtype != sample.hidden_states.dtype and (
        defect := defect_of(form.decode(sample.id, stored), form)
    ):
        return Quarantined(
            id=sample.id, reason=f"stored as {str(form.dtype)[6:]}, {defect}; float32 holds more"
        )
    return stored


def noted(folder: Path, name: str, plan_fingerprint: str) -> ShardEntry | None:
    """Return what the sidecar of a shard says, whether or not the shard is there; None without a sound one."""
    try:
        entry = ShardEntry.model_validate_json(_sidecar(folder / name).read_bytes())
    except (OSError, ValueError):  # ValueError: a sidecar that is not one
        return None
    return entry if (entry.file, entry.plan_fingerprint) == (name, plan_fingerprint) else None


def recorded(folder: Path, plan: ShardPlan, plan_fingerprint: str) -> ShardEntry | None:
    """Return the entry of a shard that is there by its sidecar and its size alone, or None."""
    entry = noted(folder, plan.name, plan_fingerprint)
    if entry is None or entry.samples + len(entry.quarantined) != len(plan.samples):
        return None
    try:
        return entry if (folder / plan.name).stat().st_size == entry.bytes else None
    except OSError:
        return None


def shard_done(folder: Path, plan: ShardPlan, plan_fingerprint: str) -> ShardEntry | None:
    """Return the entry of a shard that needs no more work, every byte of it checked, or None."""
    entry = recorded(folder, plan, plan_fingerprint)
    try:
        return entry if entry and file_sha256(folder / plan.name) == entry.sha256 else None
    except OSError:
        return None


@dataclass(frozen=True)
class Shard:
    """An open shard that keeps what its header says."""

    path: Path
    form: Format
    ids: list[str]
    offsets: list[int]
    slices: dict[str, Any]

    def sample(self, i: int, *, borrow: bool = False) -> Sample:
        """Sample i, checked and copied. A borrowed one is neither: it has views of the mapped file."""
        rows = slice(self.offsets[i], self.offsets[i + 1])
        tensors = {n: s[rows] for n, s in self.slices.items() if n != "offsets"}
        if not borrow:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if "scales" in tensors and not bool((tensors["scales"] > 0).all()):
            raise _damaged(self.path, f"sample {self.ids[i]!r} has a scale that is not positive")
        sample = self.form.decode(self.ids[i], tensors)
        if borrow:
            return sample
        states = [t for t in (sample.hidden_states, sample.last_hidden) if t is not None]
        if not all(map(_finite, states)):
            raise _damaged(self.path, f"sample {self.ids[i]!r} has NaN or Inf in its states")
        return sample

    def supervised(self) -> list[int]:
        counts = torch.zeros(self.offsets[-1] + 1, dtype=torch.int64)
        torch.cumsum(self.slices["loss_mask"][:], 0, out=counts[1:])
        return counts[self.offsets].diff().tolist()


def _finite(states: Tensor) -> bool:
    """Whether there is no NaN and no Inf, by bits: as integers they are above all other numbers of their sign.

    Several times faster than isfinite or a sum, which would be most of the price of reading.
    """
    signed, unsigned, infinity = _BITS[states.dtype]
    bits = states.view(torch.uint8).numpy()
    if not states.numel():
        return True
    top: int = infinity | 1 << (8 * states.element_size() - 1)  # -Inf
    return bool(bits.view(signed).max() < infinity and bits.view(unsigned).max() < top)


_BITS: dict[torch.dtype, tuple[Any, Any, int]] = {
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float32: (np.int32, np.uint32, 0x7F800000),
}


def _damaged(path: Path, what: object) -> UserError:
    return UserError(f"{path.name} in {path.parent} is damaged: {what}; {AGAIN}, which redoes it")


def open_shard(path: Path, entry: ShardEntry, form: Format) -> Shard:
    """Open a shard and compare everything but the data with its entry. Raises UserError.

    safetensors itself refuses a header whose sizes do not add up to the file's, so that a shape can
    never make us allocate more than that.
    """
    try:
        file: Any = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path.name} is missing in {path.parent}; {AGAIN}") from None
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from None
    metadata = file.metadata() or {}
    if metadata.get("schema") != str(SCHEMA):
        raise _damaged(path, f"its schema is {metadata.get('schema')} and ours is {SCHEMA}")
    slices = {name: file.get_slice(name) for name in sorted(file.keys())}
    found = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    layout = form.layout(entry.samples, entry.tokens)
    wanted = {name: (CODES[dtype], shape) for name, (dtype, shape) in layout.items()}
    for name in sorted(found.keys() | wanted):
        if found.get(name) != wanted.get(name):
            both = f"{name} is {found.get(name)} and the manifest needs {wanted.get(name)}"
            raise _damaged(path, both)
    offsets: list[int] = slices["offsets"][:].tolist()
    if offsets[0] != 0 or offsets[-1] != entry.tokens or any(a >= b for a, b in pairwise(offsets)):
        raise _damaged(path, f"its offsets do not run from 0 to {entry.tokens}")
    try:
        ids = json.loads(metadata.get("ids", ""))
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or [type(i) for i in ids] != [str] * entry.samples:
        raise _damaged(path, f"it does not name its {entry.samples} samples")
    if (size := path.stat().st_size) != entry.bytes:
        raise _damaged(path, f"it has {size} bytes and the manifest says {entry.bytes}")
    return Shard(path, form, ids, offsets, slices)


class ShardReader:
    """The samples of a complete states folder, by number. Raises UserError for a damaged one.

    Opening reads headers, offsets and masks; a sample is read as one byte range per tensor. At most
    MAX_OPEN_SHARDS files are mapped at a time. Survives a fork and can be pickled, for workers.

    `states` is a run's states/ or eval-sets/NAME/states/; here two taps of a target of width 8:

    >>> reader = ShardReader(states)
    >>> reader.manifest.target_layer_ids, reader.manifest.hidden_size, reader.lengths
    ((1, 8), 8, [3, 7, 1, 5, 12, 2, 4])
    >>> sample = reader[1]                       # T = 7 tokens, the last 4 of them the target's answer
    >>> sample.input_ids.shape, sample.loss_mask.tolist(), sample.hidden_states.shape   # [T], [T], [T, taps*hidden]
    (torch.Size([7]), [0, 0, 0, 1, 1, 1, 1], torch.Size([7, 16]))
    >>> first_tap, second_tap = sample.hidden_states.view(7, 2, 8).unbind(1)            # in the manifest's order
    """

    def __init__(self, folder: Path, *, verify_checksums: bool = False) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.dtype = Format.of(self.manifest).sample_dtype  # of the states it returns
        self.ids: list[str] = []
        self.lengths: list[int] = []  # tokens of each sample
        self.supervised: list[int] = []  # supervised tokens of each sample
        self._starts: list[int] = []  # number of each shard's first sample
        self._opened: OrderedDict[int, Shard] = OrderedDict()
        for k, entry in enumerate(self.manifest.shards):
            shard = self._open(k)
            supervised = shard.supervised()
            if sum(supervised) != entry.supervised_tokens or 0 in supervised:
                raise _damaged(shard.path, "its loss_mask is not the one that was written")
            if verify_checksums:
                _check_sum(shard.path, entry.sha256)
            self._starts.append(len(self.ids))
            self.ids += shard.ids
            self.lengths += [b - a for a, b in pairwise(shard.offsets)]
            self.supervised += supervised

    @property
    def totals(self) -> Totals:
        return self.manifest.totals

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Sample:
        return self.read(i)

    def borrow(self, i: int) -> Sample:
        """Sample i as views of its file, for whoever copies it somewhere at once: kept, they keep all of the file mapped.

        One pass over memory, as plain reading of a file is; NaN and Inf are not looked for, that would be a second.
        """
        return self.read(i, borrow=True)

    def read(self, i: int, *, borrow: bool = False) -> Sample:
        """Sample i, counted from the end where negative. IndexError beyond; UserError for NaN and Inf in its states."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        i %= len(self)
        k = bisect_right(self._starts, i) - 1
        shard = self._opened.pop(k, None) or self._open(k)
        self._opened[k] = shard  # the most recent is last
        if len(self._opened) > MAX_OPEN_SHARDS:
            self._opened.popitem(last=False)
        return shard.sample(i - self._starts[k], borrow=borrow)

    def iter_shard(self, k: int) -> Iterator[Sample]:
        """Yield the samples of shard k as they lie in the file."""
        shard = self._open(k)
        return (shard.sample(i) for i in range(len(shard.ids)))

    def token_frequency(self, vocabulary: int) -> Tensor:
        """How often each token is supervised, [vocabulary]."""
        counts = torch.zeros(vocabulary, dtype=torch.int64)
        for ids, mask in self.iter_tokens():
            counts += torch.bincount(ids[mask > 0].long(), minlength=vocabulary)
        return counts

    def iter_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input_ids, loss_mask), both [T], of each shard; no states are read."""
        for k in range(len(self.manifest.shards)):
            slices = self._open(k).slices
            yield slices["input_ids"][:], slices["loss_mask"][:]

    def _open(self, k: int) -> Shard:
        entry = self.manifest.shards[k]
        return open_shard(self.folder / entry.file, entry, Format.of(self.manifest))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict()}


def _check_sum(path: Path, sha256: str) -> None:
    try:
        found = file_sha256(path)
    except OSError as error:
        raise _damaged(path, error.strerror) from None
    if found != sha256:
        raise _damaged(path, f"its sha256 is {found[:12]} and the manifest says {sha256[:12]}")


def verify(folder: Path, *, released: int = 0) -> list[str]:
    """Read everything again and return what is wrong, at most one sentence a file.

    The first `released` shards were deleted by a rolling window (extract/window.py) and are not looked for.
    """
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        return [str(error)]
    form, problems = Format.of(manifest), []
    known = set()
    for number, entry in enumerate(manifest.shards):
        path = folder / entry.file
        known |= {path.name, _sidecar(path).name}
        if number < released:
            continue
        try:
            shard = open_shard(path, entry, form)
            _check_sum(path, entry.sha256)
            if sum(shard.supervised()) != entry.supervised_tokens:
                raise _damaged(path, "its count of supervised tokens is wrong")
            for i in range(len(shard.ids)):
                if defect := defect_of(shard.sample(i), form):
                    raise _damaged(path, f"sample {shard.ids[i]!r}: {defect}")
        except UserError as error:
            problems.append(str(error))
    if head := manifest.target_head:
        try:
            _check_sum(folder / head.file, head.sha256)
        except UserError as error:
            problems.append(str(error))
    for pattern in ("shard-*", ".shard-*"):
        for path in sorted(folder.glob(pattern)):
            if path.name not in known:
                problems.append(f"{path} does not belong to this manifest; delete it")
    return problems
