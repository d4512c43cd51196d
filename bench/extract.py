"""Extraction side by side with the target's bare forward and with the peers' way, and reading with plain file reading.

    python bench/extract.py --config configs/smollm2-demo.yaml

Needs a run folder with answers and states (`make demo`). All figures are of the same samples and batches, taken in turns
in one run; the fastest of the turns counts. The peers' way: all hidden states kept, the head run, one pickle per sample.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder, whose extract.py would stand in for the package of that name

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from configs.load import add_arguments, config_from_args, main_guard
from extract.manifest import Manifest, Totals
from extract.plan import ShardPlan, plan
from extract.prompts import MaskedSample
from extract.shards import ShardReader
from extract.states import write_states
from extract.target import Target, load_target
from train.batches import Schedule, StepDataset, pack


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time extraction and reading.")
    add_arguments(parser)
    parser.add_argument(
        "--tokens", type=int, default=16384, help="of the samples that are extracted"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--skip-extraction", action="store_true", help="reading only")
    args = parser.parse_args(argv)
    config = config_from_args(args)
    states = Path(config.run_dir) / "states"
    reader = ShardReader(states)
    with TemporaryDirectory(dir=config.run_dir) as name:
        if not args.skip_extraction:
            target = load_target(config.target)
            samples = _samples(reader, args.tokens)
            plans = plan(
                [len(s.input_ids) for s in samples],
                shard_tokens=args.tokens // 4,
                batch_tokens=config.extract.batch_tokens,
            )
            extraction(target, samples, plans, reader.manifest, Path(name), args.turns)
        reading(reader, config.train.max_length, config.train.batch_size, args.turns)
    return 0


def _samples(reader: ShardReader, tokens: int) -> Sequence[MaskedSample]:
    out: list[MaskedSample] = []
    while sum(len(s.input_ids) for s in out) < tokens and len(out) < len(reader):
        sample = reader[len(out)]
        out.append(MaskedSample.of(sample.id, sample.input_ids.tolist(), sample.loss_mask.tolist()))
    return out


def in_turns(
    ways: dict[str, Callable[[], None]], turns: int, before: Callable[[], None] | None = None
) -> dict[str, float]:
    """Seconds of the fastest turn of each way; one turn of all of them at a time."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(turns):
        for name, way in ways.items():
            if before:
                before()
            started = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def extraction(
    target: Target,
    samples: Sequence[MaskedSample],
    plans: Sequence[ShardPlan],
    made: Manifest,
    folder: Path,
    turns: int,
) -> None:
    tokens, count = sum(len(s.input_ids) for s in samples), iter(range(1_000_000))
    fields = {k: getattr(made, k) for k in Manifest.model_fields if k != "schema_version"}
    fields.update(complete=False, shards=(), totals=Totals.of(()), target_head=None)
    manifest = Manifest(schema=1, **fields)

    def batches() -> list[torch.Tensor]:
        out = []
        for shard in plans:
            for batch in shard.batches:
                longest = max(len(samples[i].input_ids) for i in batch)
                rows = [
                    (*samples[i].input_ids, *[0] * (longest - len(samples[i].input_ids)))
                    for i in batch
                ]
                out.append(torch.tensor(rows, device=target.device))
        return out

    def wait() -> None:
        if target.device.type == "cuda":
            torch.cuda.synchronize()

    def bare() -> None:
        for ids in batches():
            target.decoder(input_ids=ids, use_cache=False)
        wait()

    def ours() -> None:
        write_states(folder / f"ours-{next(count)}", target, samples, plans, manifest)

    def peers() -> None:
        out = folder / f"peers-{next(count)}"
        out.mkdir()
        for ids in batches():
            kept = target.model(input_ids=ids, output_hidden_states=True).hidden_states
            together = torch.cat([kept[i + 1] for i in made.target_layer_ids], dim=-1)
            for k, row in enumerate(together):
                with (out / f"{next(count)}-{k}.pt").open("wb") as file:
                    torch.save({"hidden_states": row.clone(), "input_ids": ids[k]}, file)
                    os.fsync(file.fileno())

    with torch.no_grad():
        bare()
        best = in_turns({"bare decoder": bare, "extraction": ours, "peers' way": peers}, turns)
    for name, seconds in best.items():
        print(
            f"{name:<14} {seconds:6.2f} s {tokens / seconds:9,.0f} tokens/s   "
            f"{seconds / best['bare decoder']:.3f} of the bare decoder"
        )


def reading(reader: ShardReader, max_length: int, batch_size: int, turns: int) -> None:
    """One epoch as training reads it, shuffled, against reading the same files from start to end."""
    files = [reader.folder / entry.file for entry in reader.manifest.shards]
    size = sum(file.stat().st_size for file in files)
    schedule = Schedule(pack(reader.lengths, max_length), 1, batch_size, 1, 1, 0)
    dataset = StepDataset(reader, schedule, rank=0, max_length=max_length, last_hidden=False)
    order = [
        i
        for s in range(schedule.total_steps)
        for v in schedule.micro_batch(s, 0, 0)
        for i in v.samples
    ]
    buffer = bytearray(1 << 23)

    def forget() -> None:
        """Let the kernel drop what it has cached of these files."""
        for file in files:
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)

    def raw() -> None:
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass

    def samples() -> None:
        for i in order:
            reader[i]

    def epoch() -> None:
        for step in range(schedule.total_steps):
            dataset[step]

    ways = {
        "raw, sequential": raw,
        "packed batches, shuffled": epoch,
        "samples, checked and copied": samples,
    }
    for state, before in (("cold", forget), ("cached", None)):
        best = in_turns(ways, turns, before)
        for name, seconds in best.items():
            print(
                f"{state:<6} {name:<28} {seconds:6.2f} s {size / seconds / 1e9:6.2f} GB/s   "
                f"{best['raw, sequential'] / seconds:.2f} of raw"
            )


if __name__ == "__main__":
    sys.exit(main_guard(main))
