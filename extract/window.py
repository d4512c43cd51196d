"""A rolling window: extraction and training at the same time, on a disk that holds only part of the states.

    states/plan.json      what every shard will hold; extract writes it before the first one
    states/window.json    how many shards training is done with; train writes it after a checkpoint

Extraction writes shards in order and waits while the next one would not fit into the budget. Training deletes a shard
when no step after its last checkpoint reads it, so that either side can be killed at any moment and started again.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from configs.load import UserError
from configs.provenance import atomic_write_json, atomic_write_text
from extract.manifest import AGAIN, MANIFEST, Manifest, Record, ShardEntry, Totals, read_manifest
from extract.plan import ShardPlan, shard_name
from extract.prompts import MaskedSample
from extract.sample import STORAGE_DTYPES, Format, Sample, estimate_bytes
from extract.shards import MAX_OPEN_SHARDS, Shard, noted, open_shard
from extract.waiting import POLL_SECONDS, Notice

PLAN, WINDOW = "plan.json", "window.json"


class PlannedShard(Record):
    """What a shard will hold, sample by sample, and the most bytes that it will take."""

    ids: tuple[str, ...] = Field(min_length=1)
    lengths: tuple[int, ...]
    supervised: tuple[int, ...]
    bytes: int


class WindowPlan(Record):
    plan_fingerprint: str
    shards: tuple[PlannedShard, ...] = Field(min_length=1)
    frequency: tuple[int, ...]  # of each token of the vocabulary among the supervised ones

    @property
    def totals(self) -> Totals:
        return Totals(
            samples=sum(len(s.ids) for s in self.shards),
            tokens=sum(sum(s.lengths) for s in self.shards),
            supervised_tokens=sum(sum(s.supervised) for s in self.shards),
            bytes=sum(s.bytes for s in self.shards),
        )


def make_plan(
    samples: Sequence[MaskedSample], plans: Sequence[ShardPlan], manifest: Manifest
) -> WindowPlan:
    """The plan of these samples, before any of them has states."""
    taps, dtype = len(manifest.target_layer_ids), STORAGE_DTYPES[manifest.storage_dtype]
    frequency = torch.zeros(manifest.vocab_size, dtype=torch.int64)
    shards = []
    for plan in plans:
        held = [samples[i] for i in plan.samples]
        ids, tokens = [s.id for s in held], sum(len(s.input_ids) for s in held)
        states = estimate_bytes(tokens, taps, manifest.hidden_size, dtype, manifest.last_hidden)
        header = 2048 + len(json.dumps(json.dumps(ids)))  # of tensors and names, with room to spare
        for sample in held:
            tokens_of = torch.frombuffer(sample.input_ids, dtype=torch.int32)
            answer = tokens_of[torch.frombuffer(sample.loss_mask, dtype=torch.uint8) > 0]
            frequency += torch.bincount(answer, minlength=manifest.vocab_size)
        shards.append(
            PlannedShard(
                ids=tuple(ids),
                lengths=tuple(len(s.input_ids) for s in held),
                supervised=tuple(sum(s.loss_mask) for s in held),
                bytes=states + 8 * (len(ids) + 1) + header,
            )
        )
    return WindowPlan(
        plan_fingerprint=manifest.plan_fingerprint,
        shards=tuple(shards),
        frequency=tuple(frequency.tolist()),
    )


def write_plan(folder: Path, plan: WindowPlan) -> None:
    atomic_write_text(folder / PLAN, plan.model_dump_json())


def read_plan(folder: Path) -> WindowPlan | None:
    """The plan of a states folder, None while there is none. UserError for a damaged one."""
    try:
        return WindowPlan.model_validate_json((folder / PLAN).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise UserError(f"{folder / PLAN} is damaged ({reason}); {AGAIN}") from None


def begun(folder: Path) -> tuple[WindowPlan, Manifest] | None:
    """Plan and manifest of an extraction that has begun with a window: there, and of the same samples."""
    if not (folder / MANIFEST).exists() or (plan := read_plan(folder)) is None:
        return None
    manifest = read_manifest(folder, incomplete_ok=True)
    return (plan, manifest) if plan.plan_fingerprint == manifest.plan_fingerprint else None


class _Released(Record):
    plan_fingerprint: str
    shards: int = Field(ge=0)


def released(folder: Path, plan_fingerprint: str) -> int:
    """How many of the first shards training is done with. UserError when the record is damaged."""
    try:
        record = _Released.model_validate_json((folder / WINDOW).read_bytes())
    except FileNotFoundError:
        return 0
    except ValidationError:
        raise UserError(
            f"{folder / WINDOW} is damaged; delete it, and {AGAIN}, which makes the deleted shards anew"
        ) from None
    return record.shards if record.plan_fingerprint == plan_fingerprint else 0


def released_in(folder: Path) -> int:
    """How many of the first shards of a states folder were deleted, of whatever plan it is."""
    if not (folder / MANIFEST).exists():
        return 0
    return released(folder, read_manifest(folder, incomplete_ok=True).plan_fingerprint)


def release(folder: Path, plan_fingerprint: str, count: int) -> None:
    """Delete the first `count` shards and let extraction go on. They stay deleted: a smaller count changes nothing."""
    count = max(count, released(folder, plan_fingerprint))
    for index in range(count):
        (folder / shard_name(index)).unlink(missing_ok=True)
    # Last, so that what extraction adds never comes on top of what is still there.
    record = _Released(plan_fingerprint=plan_fingerprint, shards=count)
    atomic_write_json(folder / WINDOW, record.model_dump())


class Window:
    """Extraction's side: which shards training is done with, and whether there is room for the next.

    Without `gigabytes` there is room for all and nothing is ever released.
    """

    def __init__(self, folder: Path, plan: WindowPlan | None, gigabytes: float | None) -> None:
        """UserError when a single shard is larger than the window."""
        self.folder, self.plan, self.limit = folder, plan, math.inf
        if plan is None or gigabytes is None:
            return
        self.limit = round(gigabytes * 1e9)
        self.before = list(accumulate((s.bytes for s in plan.shards), initial=0))
        largest = max(s.bytes for s in plan.shards)
        if largest > self.limit:
            raise UserError(
                f"extract.window_gb={gigabytes:g} is smaller than one shard of {largest / 1e9:.3g} GB; raise it, or "
                "lower extract.shard_tokens"
            )

    def released(self) -> int:
        return released(self.folder, self.plan.plan_fingerprint) if self.plan else 0

    def yet_to_come(self, missing: int, present: int) -> int:
        """The most bytes that the disk must still take, when so many are missing and so many are there."""
        return int(min(missing, max(self.limit - present, 0)))

    def has_room(self, index: int) -> bool:
        """Whether shard `index` fits, with all before it that training still needs."""
        if self.plan is None:
            return True
        return self.before[index + 1] - self.before[self.released()] <= self.limit

    def wait_for_room(self, index: int, *, quiet: bool) -> None:
        notice = Notice(at_once=True)
        while self.plan and not self.has_room(index):
            if not quiet:
                notice.say(
                    f"waiting:  {index} of {len(self.plan.shards)} shards are made and the window of "
                    f"{self.limit / 1e9:g} GB is full; train/main.py makes room as it goes"
                )
            time.sleep(POLL_SECONDS)


class WindowReader:
    """Training's side: the planned samples by number, in the manner of ShardReader, as far as they are there."""

    def __init__(self, folder: Path) -> None:
        """UserError when extraction has not begun with a window, or is of another plan than the manifest."""
        self.folder = folder
        if (found := begun(folder)) is None:
            raise UserError(f"{folder} has no {PLAN} of its manifest's samples; {AGAIN}")
        self.plan, self.manifest = found
        self._form = Format.of(self.manifest)
        self.dtype = self._form.sample_dtype
        self.ids = [i for s in self.plan.shards for i in s.ids]
        self.lengths = [n for s in self.plan.shards for n in s.lengths]
        self.supervised = [n for s in self.plan.shards for n in s.supervised]
        self._starts = list(accumulate((len(s.ids) for s in self.plan.shards), initial=0))
        self._opened: OrderedDict[int, tuple[Shard, dict[str, int]]] = OrderedDict()

    @property
    def totals(self) -> Totals:
        return self.plan.totals

    def samples_of(self, shard: int) -> range:
        return range(self._starts[shard], self._starts[shard + 1])

    def has(self, shard: int) -> bool:
        """Whether extraction has finished this shard."""
        return self._entry(shard) is not None and (self.folder / shard_name(shard)).exists()

    def wait_for(self, shards: Sequence[int]) -> None:
        while not all(self.has(k) for k in shards):
            time.sleep(POLL_SECONDS)

    def __len__(self) -> int:
        return len(self.ids)

    def borrow(self, i: int) -> Sample | None:
        """As ShardReader.borrow; None when the sample was left out of its shard because its states are unfit."""
        k = bisect_right(self._starts, i) - 1
        self._forget_deleted()
        shard, place = self._opened.pop(k) if k in self._opened else self._open(k)
        self._opened[k] = shard, place  # the most recent is last
        if len(self._opened) > MAX_OPEN_SHARDS:
            self._opened.popitem(last=False)
        at = place.get(self.ids[i])
        return None if at is None else shard.sample(at, borrow=True)

    def token_frequency(self, vocabulary: int) -> Tensor:
        counts = torch.zeros(vocabulary, dtype=torch.int64)
        counts[: len(self.plan.frequency)] = torch.tensor(self.plan.frequency)
        return counts

    def _entry(self, k: int) -> ShardEntry | None:
        return noted(self.folder, shard_name(k), self.plan.plan_fingerprint)

    def _open(self, k: int) -> tuple[Shard, dict[str, int]]:
        entry = self._entry(k)
        if entry is None or not (self.folder / entry.file).exists():
            raise UserError(
                f"shard {k} of {self.folder} is not there any more: training deleted it when a checkpoint no longer "
                "needed it; go on from the latest checkpoint, or train in another run_dir"
            )
        shard = open_shard(self.folder / entry.file, entry, self._form)
        return shard, {name: at for at, name in enumerate(shard.ids)}

    def _forget_deleted(self) -> None:
        """A deleted file that is still mapped would keep its space."""
        for k in [k for k, (shard, _) in self._opened.items() if not shard.path.exists()]:
            del self._opened[k]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": OrderedDict()}
