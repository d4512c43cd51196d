"""From rows of token ids to a finished states folder: the target forward, shard by shard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.load import UserError
from configs.provenance import file_sha256, free_space_check
from extract.head import FILE as HEAD_FILE
from extract.head import head_of, save_head
from extract.manifest import (
    MANIFEST,
    Manifest,
    ShardEntry,
    TargetHead,
    Totals,
    read_manifest,
    write_manifest,
)
from extract.prompts import MaskedSample
from extract.sample import STORAGE_DTYPES
from extract.shards import (
    Sample,
    ShardPlan,
    estimate_bytes,
    noted,
    owned,
    recorded,
    shard_done,
    write_shard,
)
from extract.target import Target
from extract.waiting import made_by
from extract.window import Window, make_plan, write_plan

Look = Callable[[Path, ShardPlan, str], ShardEntry | None]  # how well a shard is looked at


@dataclass(frozen=True)
class Computed:
    """The samples of a shard, in plan order. On CUDA their states may still be on their way from the device."""

    samples: list[Sample]
    copied: Any = None  # a CUDA event

    def arrived(self) -> list[Sample]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.samples


def forward_shard(
    target: Target,
    plan: ShardPlan,
    samples: Sequence[MaskedSample],
    taps: Sequence[int],
    last_hidden: bool,
) -> Computed:
    """Batches are padded on the right. Returns without waiting for the device."""
    out: dict[int, Sample] = {}
    for batch in plan.batches:
        longest = max(len(samples[i].input_ids) for i in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, i in enumerate(batch):
            ids[row, : len(samples[i].input_ids)] = torch.frombuffer(
                samples[i].input_ids, dtype=torch.int32
            )
        features, last = target.forward_taps(ids.to(target.device), taps, use_cache=False)
        features = _to_host(features)
        kept = _to_host(last) if last_hidden else None
        for row, i in enumerate(batch):
            size = len(samples[i].input_ids)
            out[i] = Sample(
                id=samples[i].id,
                input_ids=ids[row, :size].to(torch.int32),
                loss_mask=torch.frombuffer(samples[i].loss_mask, dtype=torch.uint8),
                hidden_states=features[row, :size],
                last_hidden=None if kept is None else kept[row, :size],
            )
    copied = None
    if target.device.type == "cuda":
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(target.device))
    return Computed([out[i] for i in plan.samples], copied)


def _to_host(states: Tensor) -> Tensor:
    """On CUDA the copy goes into pinned memory and is not waited for."""
    if states.device.type != "cuda":
        return states.cpu()
    host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    return host.copy_(states, non_blocking=True)


def overlapped(
    plans: Sequence[ShardPlan],
    compute: Callable[[ShardPlan], Computed],
    write: Callable[[ShardPlan, Computed], ShardEntry],
) -> Iterator[tuple[ShardPlan, ShardEntry]]:
    """Check, hash and write one shard while the target is at the next; two of them are in memory."""
    with ThreadPoolExecutor(max_workers=1) as writer:
        before: tuple[ShardPlan, Future[ShardEntry]] | None = None
        for plan in plans:
            computed = compute(plan)
            if before:
                yield before[0], before[1].result()
            before = plan, writer.submit(write, plan, computed)
        if before:
            yield before[0], before[1].result()


def write_states(
    folder: Path,
    target: Target,
    samples: Sequence[MaskedSample],
    plans: Sequence[ShardPlan],
    manifest: Manifest,
    *,
    make: Callable[[ShardPlan], list[Sample]] | None = None,
    rank: int = 0,
    world: int = 1,
    window_gb: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest | None:
    """Write every shard that is not there yet; process r of w writes shards r, r+w, ... and returns.

    `make` gives the samples of a shard, in plan order, where it is not the target that runs the forward.
    Process 0 then waits for the others' shards, reads each of them once, completes the manifest and returns it; the
    others return None. Samples with NaN, Inf or zeros for states are left out, named in the manifest, and tried once
    more by every later call. With `window_gb` no more than that is on the disk at a time (extract/window.py), training
    runs meanwhile, and an unfit sample is tried once. UserError when the disk cannot hold what is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taps, stamp, dtype = (
        manifest.target_layer_ids,
        manifest.plan_fingerprint,
        STORAGE_DTYPES[manifest.storage_dtype],
    )
    head = head_of(target)
    mine = owned(plans, rank, world)
    window_plan = None if window_gb is None else make_plan(samples, plans, manifest)
    window = Window(folder, window_plan, window_gb)

    def standing(plan: ShardPlan, look: Look) -> ShardEntry | None:
        if plan.index < window.released():  # training has read it and deleted it
            return noted(folder, plan.name, stamp)
        return look(folder, plan, stamp)

    entries = {p.index: standing(p, shard_done) for p in mine}
    for plan in plans:  # what the others find damaged is theirs to redo
        if plan.index not in entries:
            entries[plan.index] = standing(plan, recorded)
    # By process 0 alone and at the end: another process could not tell a shard from an earlier run from its new one.
    # With a window training may be reading it, so it stays as it is.
    again = [p for p in plans if rank == 0 and (e := entries[p.index]) and e.quarantined]
    again = again if window_plan is None else []
    left = [p for p in plans if entries[p.index] is None]
    tokens = sum(len(samples[i].input_ids) for p in left for i in p.samples)
    needed = estimate_bytes(tokens, len(taps), manifest.hidden_size, dtype, manifest.last_hidden)
    present = sum(e.bytes for i, e in entries.items() if e and i >= window.released())
    needed = window.yet_to_come(needed, present)
    if not (folder / HEAD_FILE).exists():
        needed += sum(t.numel() * target.dtype.itemsize for t in head.tensors().values())
    free_space_check(folder, needed, f"writing {tokens:,} more tokens of states")
    if rank == 0:
        # The head comes first: with a window, training starts as soon as there is a plan.
        kept = _kept_head(folder, stamp) or TargetHead(**save_head(head, folder, target.dtype))
        manifest = manifest.model_copy(update={"target_head": kept})
        if left or again:  # a finished folder is never declared unfinished again
            write_manifest(folder, manifest)
        if window_plan:
            write_plan(folder, window_plan)

    def compute(plan: ShardPlan) -> Computed:
        window.wait_for_room(plan.index, quiet=rank != 0)
        if make is not None:
            return Computed(make(plan))
        return forward_shard(target, plan, samples, taps, manifest.last_hidden)

    def write(plan: ShardPlan, computed: Computed) -> ShardEntry:
        entry = write_shard(
            folder,
            plan,
            computed.arrived(),
            num_taps=len(taps),
            storage_dtype=dtype,
            plan_fingerprint=stamp,
        )
        for sample in entry.quarantined:
            print(f"warning: left out {sample.id!r}: {sample.reason}", file=sys.stderr, flush=True)
        return entry

    done = {p.index: entry for p in mine if (entry := entries[p.index])}
    total = sum(len(s.input_ids) for s in samples)
    for plan, entry in overlapped([p for p in mine if p.index not in done], compute, write):
        done[plan.index] = entry
        if progress:
            progress(sum(e.tokens for e in done.values()), total)
    if rank != 0:
        return None
    for plan in plans:
        if plan.index not in done:
            look = partial(standing, plan, shard_done)
            done[plan.index] = made_by(plan.index % world, world, plan.name, look)
    for plan in again:
        done[plan.index] = write(plan, compute(plan))
    shards = tuple(done[p.index] for p in plans)
    fields = {
        name: getattr(manifest, name) for name in Manifest.model_fields if name != "schema_version"
    }
    fields.update(complete=True, shards=shards, totals=Totals.of(shards))
    complete = Manifest(schema=manifest.schema_version, **fields)
    for stale in folder.glob(f".{MANIFEST}.tmp-*"):  # of killed runs; process 0 alone writes it
        stale.unlink(missing_ok=True)
    write_manifest(folder, complete)
    return complete


def _kept_head(folder: Path, stamp: str) -> TargetHead | None:
    """The head file of an earlier run of this plan, if every byte is still there: a disk may have no room for two."""
    try:
        manifest = read_manifest(folder, incomplete_ok=True)
        head = manifest.target_head
        good = head and file_sha256(folder / head.file) == head.sha256
    except (UserError, OSError):
        return None
    return head if good and manifest.plan_fingerprint == stamp else None
