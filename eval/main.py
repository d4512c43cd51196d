"""Measure the acceptance length of checkpoints.

    python eval/main.py --config configs/smollm2-demo.yaml --checkpoint all --mode replay
    python eval/main.py --config configs/smollm2-demo.yaml --checkpoint latest --mode live
    python eval/main.py --config configs/smollm2-demo.yaml --checkpoint latest --mode served --server http://HOST:PORT

`replay` computes acceptance from the stored states of the target's own greedy answers, without the target, for DFlash and
every tree budget at once. `live` decodes with the target: plain, DFlash, DDTree, same prompts, and compares every answer
with plain decoding token by token. `served` lets a running vLLM or SGLang, started with the checkpoint as its drafter,
decode the prompts of `live`, and reads acceptance from the engine's own counters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from configs.load import UserError, add_arguments, config_from_args, main_guard
from configs.provenance import FolderLock, file_sha256, provenance
from configs.schema import Config
from eval.decode import Decoded
from eval.engines import connect
from eval.live import live_sets
from eval.metrics import MODES
from eval.replay import replay_sets
from eval.report import invalid_rows, latest_results, read_results, terminal_table, write_report
from eval.served import served_sets
from eval.track import log_results
from extract.head import load_head
from extract.manifest import require
from extract.shards import ShardReader
from extract.target import DTYPES, load_target, pick_device
from train.checkpoint import complete_checkpoints, find_checkpoint, step_of
from train.drafter import DFlashDrafter, DraftShape
from train.layout import load_drafter, load_shape

# rows, what the comparison with plain decoding found, notes
Measured = tuple[list[dict[str, Any]], dict[str, Any] | None, list[str]]


def main(argv: Sequence[str] | None = None) -> int | None:
    parser = argparse.ArgumentParser(
        description="Measure the acceptance length of checkpoints.",
        epilog="example: python eval/main.py --config configs/smollm2-demo.yaml --checkpoint latest --mode live",
    )
    add_arguments(parser)
    parser.add_argument(
        "--checkpoint", default="latest", help="latest, all, a step folder's name, or a folder"
    )
    parser.add_argument("--mode", choices=tuple(MODES), default="replay")
    parser.add_argument(
        "--server", metavar="URL", help="of a running vLLM or SGLang, for --mode served"
    )
    parser.add_argument(
        "--again", action="store_true", help="evaluate checkpoints that have results already"
    )
    args = parser.parse_args(argv)
    config = config_from_args(args)
    run_dir = Path(config.run_dir)
    if (args.mode == "served") != bool(args.server):
        raise UserError("--mode served and --server URL go together; give both or neither")
    if args.server and args.checkpoint == "all":
        raise UserError("a server has one drafter; give --checkpoint the one it was started with")
    if not config.eval.prompts:
        raise UserError("eval.prompts names no held-out set; add at least one")
    if args.checkpoint == "all":
        folders = complete_checkpoints(run_dir)
        if not folders:
            raise UserError(f"{run_dir} has no complete checkpoint; train first")
    else:
        folders = [find_checkpoint(run_dir, args.checkpoint)]
    sets = {
        Path(name).stem: ShardReader(run_dir / "eval-sets" / Path(name).stem / "states")
        for name in config.eval.prompts
    }
    for name, reader in sets.items():
        check_set(config, name, reader)

    measure = measurer(config, args.mode, args.server, sets)
    failed = False
    with FolderLock(run_dir, f"eval-{args.mode}"):
        for folder in folders:
            out = results_folder(run_dir, folder, args.mode)
            if not args.again and evaluated(out, folder):
                print(f"{folder.name} has {args.mode} results in {out}; --again evaluates it anew")
                continue
            started = time.monotonic()
            rows, check, notes = measure(folder)
            results = {
                "schema": 1,
                "mode": args.mode,
                "checkpoint": {
                    "path": str(folder),
                    "step": step_number(folder),
                    "fingerprint": fingerprint_of(folder),
                },
                "target": next(iter(sets.values())).manifest.target.model_dump()
                | {
                    "dtype": "the server's own" if args.server else config.eval.dtype,
                    "enable_thinking": config.target.enable_thinking,
                },
                "provenance": provenance(config, ["python", "eval/main.py", *sys.argv[1:]]),
                "rows": rows,
                "lossless_check": check,
                "notes": notes,
            }
            history = [r for r in latest_results(run_dir) if r["mode"] == args.mode]
            write_report(out, results, history)
            log_results(run_dir, config, results)
            print(f"\n{folder.name}, {args.mode}, {time.monotonic() - started:.0f} s")
            print("\n".join([terminal_table(results), *notes]))
            print(f"report: {out / 'report.md'}", flush=True)
            for row in invalid_rows(results):
                print(f"error: {row}", file=sys.stderr)
                failed = True
    return 1 if failed else None


def results_folder(run_dir: Path, checkpoint: Path, mode: str) -> Path:
    """evals/step-000200 for replay, which every checkpoint gets; its other results lie in folders below."""
    folder = run_dir / "evals" / checkpoint.resolve().name
    return folder if mode == "replay" else folder / mode


def evaluated(results: Path, checkpoint: Path) -> bool:
    """Whether these results are of these weights."""
    file = results / "results.json"
    if not file.exists():
        return False
    found: str = read_results(file)["checkpoint"]["fingerprint"]
    return found == fingerprint_of(checkpoint)


def step_number(checkpoint: Path) -> int | None:
    return step_of(checkpoint) if checkpoint.name.startswith("step-") else None


def fingerprint_of(checkpoint: Path) -> str:
    return file_sha256(checkpoint / "model.safetensors")[:16]


def check_set(config: Config, name: str, reader: ShardReader) -> None:
    """Replay is exact for the target's own greedy answers in the precision of the evaluation, and for nothing else."""
    answers = reader.manifest.answers
    if not answers.greedy or answers.source != "regenerated":
        raise UserError(
            f"the states of {name} are not of the target's own greedy answers; extract them again"
        )
    require(
        reader.manifest,
        reader.folder,
        target_dtype=config.eval.dtype,
        enable_thinking=config.target.enable_thinking,
        **{"answers.max_new_tokens": config.eval.max_new_tokens},
    )


def measurer(
    config: Config, mode: str, server: str | None, sets: dict[str, ShardReader]
) -> Callable[[Path], Measured]:
    """What measures a checkpoint in a mode, with everything loaded that its checkpoints share."""
    if server:
        engine = connect(server)

        def served(folder: Path) -> Measured:
            rows, notes = served_sets(config, engine, checked_shape(folder, sets).block_size, sets)
            return rows, None, notes

        return served

    device = pick_device(config.target.device)
    dtype = DTYPES[config.eval.dtype]
    head = load_head(next(iter(sets.values())).folder, device=device, dtype=dtype)
    if mode == "replay":
        return lambda folder: (
            replay_sets(config, load(folder, sets, device, dtype), head, sets),
            None,
            [],
        )

    target = load_target(config.target, dtype=config.eval.dtype)
    reference: dict[str, list[Decoded]] = {}  # plain answers, the same for every checkpoint

    def live(folder: Path) -> Measured:
        drafter = load(folder, sets, device, dtype)
        return *live_sets(config, target, drafter, head, sets, reference), []

    return live


def load(
    folder: Path, sets: dict[str, ShardReader], device: torch.device, dtype: torch.dtype
) -> DFlashDrafter:
    """A drafter, checked against the states it is about to read. UserError names both sides."""
    checked_shape(folder, sets)
    try:
        drafter = load_drafter(folder, dtype)
    except ValueError as error:
        raise UserError(str(error)) from None
    return drafter.to(device).eval().requires_grad_(False)


def checked_shape(folder: Path, sets: dict[str, ShardReader]) -> DraftShape:
    """What a checkpoint says of itself, checked against the states of its target. UserError names both sides."""
    try:
        drafter, shape = load_shape(folder)
    except ValueError as error:
        raise UserError(str(error)) from None
    for reader in sets.values():
        require(
            reader.manifest,
            reader.folder,
            target_layer_ids=shape.target_layer_ids,
            num_target_layers=shape.num_target_layers,
            mask_token_id=shape.mask_token_id,
            hidden_size=drafter.hidden_size,
            vocab_size=drafter.vocab_size,
        )
    return shape


if __name__ == "__main__":
    sys.exit(main_guard(main))
