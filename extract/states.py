"""From rows of token ids to a finished states folder: the target forward, shard by shard."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from configs.load import UserError
from configs.provenance import file_sha256, free_space_check
from extract.head import FILE as HEAD_FILE
from extract.head import head_of, save_head
from extract.manifest import Manifest, TargetHead, Totals, write_manifest
from extract.prompts import MaskedSample
from extract.sample import STORAGE_DTYPES
from extract.shards import Sample, ShardPlan, estimate_bytes, owned, shard_done, write_shard
from extract.target import Target


def probe(target: Target, taps: Sequence[int], ids: Sequence[int]) -> None:
    """Prove on one sequence that the taps are what design.md 2 says they are. UserError when not.

    Each tap must equal transformers' own hidden state of that layer (the entry after the last block is post-norm, so a
    tap of the last block is compared through the final norm, which is `last_hidden`), and `last_hidden` must give the
    target's own logits.
    """
    x = torch.tensor([list(ids)[:64]], device=target.device)
    features, last_hidden = target.forward_taps(x, taps)
    with torch.no_grad():
        out = target.model(input_ids=x, output_hidden_states=True)
    by_tap = features.split(target.config.hidden_size, dim=-1)
    for tap, state in zip(taps, by_tap, strict=True):
        if tap < len(target.layers) - 1:
            _close(state, out.hidden_states[tap + 1], f"tap {tap} of {target.label}")
    _close(
        target.logits(last_hidden),
        out.logits,
        f"logits of {target.label} from its last hidden state",
    )


def _close(ours: Tensor, theirs: Tensor, what: str) -> None:
    scale = theirs.float().abs().max().clamp(min=1e-6)
    difference = float((ours.float() - theirs.float()).abs().max() / scale)
    limit = 1e-4 if ours.dtype == torch.float32 else 2e-2
    if not difference <= limit:
        raise UserError(
            f"{what} differ from a plain forward by {difference:.1e} (limit {limit:.0e}); this target does not "
            "work with this transformers release, please report it"
        )


def forward_shard(
    target: Target,
    plan: ShardPlan,
    samples: Sequence[MaskedSample],
    taps: Sequence[int],
    last_hidden: bool,
) -> list[Sample]:
    """The samples of a shard with their states, in plan order. Batches are padded on the right."""
    out: dict[int, Sample] = {}
    for batch in plan.batches:
        longest = max(len(samples[i].input_ids) for i in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, i in enumerate(batch):
            ids[row, : len(samples[i].input_ids)] = torch.tensor(samples[i].input_ids)
        features, last = target.forward_taps(ids.to(target.device), taps)
        features = features.cpu()
        for row, i in enumerate(batch):
            size = len(samples[i].input_ids)
            out[i] = Sample(
                id=samples[i].id,
                input_ids=ids[row, :size].to(torch.int32),
                loss_mask=torch.tensor(samples[i].loss_mask, dtype=torch.uint8),
                hidden_states=features[row, :size],
                last_hidden=last[row, :size].cpu() if last_hidden else None,
            )
    return [out[i] for i in plan.samples]


def write_states(
    folder: Path,
    target: Target,
    samples: Sequence[MaskedSample],
    plans: Sequence[ShardPlan],
    manifest: Manifest,
    *,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write every shard that is not there yet, then the manifest. Process r writes shards r, r+world, ...

    Every process returns when all shards are there; the last one to finish completes the manifest (it is the same for
    all of them). UserError when the disk cannot hold what is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taps, stamp = manifest.target_layer_ids, manifest.plan_fingerprint
    mine = owned(plans, rank, world)
    done = {p.index: entry for p in mine if (entry := shard_done(folder, p, stamp))}
    left = sum(len(samples[i].input_ids) for p in mine if p.index not in done for i in p.samples)
    needed = estimate_bytes(
        left,
        len(taps),
        manifest.hidden_size,
        STORAGE_DTYPES[manifest.storage_dtype],
        manifest.last_hidden,
    )
    free_space_check(folder, needed, f"writing {left:,} more tokens of states")
    if left:  # a finished folder is never declared unfinished again
        write_manifest(folder, manifest)
    total = sum(len(s.input_ids) for s in samples)
    for plan in mine:
        if plan.index not in done:
            done[plan.index] = write_shard(
                folder,
                plan,
                forward_shard(target, plan, samples, taps, manifest.last_hidden),
                num_taps=len(taps),
                storage_dtype=STORAGE_DTYPES[manifest.storage_dtype],
                plan_fingerprint=stamp,
            )
        if progress:
            progress(sum(e.tokens for e in done.values()), total)
    for plan in plans:  # the other processes' shards
        while plan.index not in done:
            if entry := shard_done(folder, plan, stamp):
                done[plan.index] = entry
            else:
                time.sleep(0.5)
    entries = tuple(done[p.index] for p in plans)
    head = save_head(head_of(target), folder, target.dtype) if rank == 0 else None
    while head is None and not (folder / HEAD_FILE).exists():
        time.sleep(0.5)
    if head is None:
        head = {"file": HEAD_FILE, "sha256": file_sha256(folder / HEAD_FILE)}
    fields = {
        name: getattr(manifest, name) for name in Manifest.model_fields if name != "schema_version"
    }
    fields.update(
        complete=True, shards=entries, totals=Totals.of(entries), target_head=TargetHead(**head)
    )
    complete = Manifest(schema=manifest.schema_version, **fields)
    write_manifest(folder, complete)
    return complete
