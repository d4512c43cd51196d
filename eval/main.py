"""Measure the acceptance length of checkpoints.

    python eval/main.py --config configs/smollm2-demo.yaml --checkpoint all --mode replay
    python eval/main.py --config configs/smollm2-demo.yaml --checkpoint latest --mode live
    python eval/main.py --config configs/smollm2-demo.yaml --self-test

`replay` computes acceptance from the stored states of the target's own greedy answers, without the target, for DFlash and
every tree budget at once. `live` decodes with the target: plain, DFlash, DDTree, same prompts, and compares every greedy
answer with plain decoding token by token; eval.temperature and its kin apply to it. `--self-test` proves on the target
itself, in the precision of eval.dtype, that drafts leave no trace; live decoding starts with a short form of it.

    python eval/main.py compare runs/a runs/b

says whether one drafter is better than another, from their results; see eval/compare.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch

from configs.load import UserError, add_arguments, config_from_args, main_guard
from configs.provenance import FolderLock, file_sha256, fingerprint, provenance
from configs.schema import Config, EvalConfig
from eval import compare
from eval.decode import Decoded
from eval.live import live_sets
from eval.replay import replay_sets
from eval.report import terminal_table, write_report
from eval.results import invalid_rows, latest_results, read_results
from eval.selftest import describe, self_test, test_prompt
from eval.track import log_results
from extract.choose import Sampler
from extract.head import load_head
from extract.manifest import Manifest, require
from extract.shards import ShardReader
from extract.target import DTYPES, Target, load_target, pick_device
from train.checkpoint import complete_checkpoints, find_checkpoint, step_of
from train.drafter import DFlashDrafter
from train.layout import load_drafter


def main(argv: list[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:
        return compare.main(argv[1:])
    parser = argparse.ArgumentParser(
        description="Measure the acceptance length of checkpoints.",
        epilog="example: python eval/main.py --config configs/smollm2-demo.yaml --checkpoint latest --mode live. "
        "`python eval/main.py compare A B` compares two checkpoints or runs; `compare --help` says more.",
    )
    add_arguments(parser)
    parser.add_argument(
        "--checkpoint", default="latest", help="latest, all, a step folder's name, or a folder"
    )
    parser.add_argument("--mode", choices=("replay", "live"), default="replay")
    parser.add_argument(
        "--again", action="store_true", help="evaluate checkpoints that have results already"
    )
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="no checkpoint: check that decoding on this target is lossless",
    )
    args = parser.parse_args(argv)
    config = config_from_args(args)
    if args.self_test:
        return run_self_test(config)
    run_dir = Path(config.run_dir)
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

    device = pick_device(config.target.device)
    dtype = DTYPES[config.eval.dtype]
    head = load_head(
        run_dir / "eval-sets" / next(iter(sets)) / "states", device=device, dtype=dtype
    )
    target = load_target(config.target, dtype=config.eval.dtype) if args.mode == "live" else None
    notes = notes_on(config.eval, args.mode)
    for note in notes:
        print(note)
    reference: dict[str, list[Decoded]] = {}  # plain answers, the same for every checkpoint
    if target is not None:
        require_lossless(target, config)
    failed = False
    with FolderLock(run_dir, f"eval-{args.mode}"):
        for folder in folders:
            out = results_folder(run_dir, folder, args.mode)
            settings = settings_of(config, args.mode)
            if not args.again and evaluated(out, folder, settings):
                print(f"{folder.name} has {args.mode} results in {out}; --again evaluates it anew")
                continue
            drafter = load(folder, sets, device, dtype)
            started = time.monotonic()
            if target is None:
                rows, check = replay_sets(config, drafter, head, sets), None
            else:
                rows, check = live_sets(config, target, drafter, head, sets, reference)
            results = {
                "schema": 1,
                "mode": args.mode,
                "checkpoint": {
                    "path": str(folder),
                    "step": step_number(folder),
                    "fingerprint": fingerprint_of(folder),
                },
                "target": next(iter(sets.values())).manifest.target.model_dump()
                | {"dtype": config.eval.dtype, "enable_thinking": config.target.enable_thinking},
                "settings": settings,
                "max_new_tokens": config.eval.max_new_tokens,
                "sampling": Sampler.of(config.eval).settings if args.mode == "live" else {},
                "provenance": provenance(config, ["python", "eval/main.py", *sys.argv[1:]]),
                "rows": rows,
                "lossless_check": check,
                "notes": notes,
            }
            history = [r for r in latest_results(run_dir) if r["mode"] == args.mode]
            write_report(out, results, history)
            log_results(run_dir, config, results)
            print(f"\n{folder.name}, {args.mode}, {time.monotonic() - started:.0f} s")
            print(terminal_table(results))
            print(f"report: {out / 'report.md'}", flush=True)
            for row in invalid_rows(results):
                print(f"error: {row}", file=sys.stderr)
                failed = True
    return 1 if failed else None


def run_self_test(config: Config) -> int:
    """Status 1 when a check fails."""
    target = load_target(config.target, dtype=config.eval.dtype)
    print(f"{target.label}, {config.eval.dtype}: {describe(target)}", flush=True)
    checks = self_test(target, test_prompt(target, config))
    print("\n".join(map(str, checks)))
    passed = all(check.passed for check in checks)
    print(
        "lossless" if passed else "NOT lossless: no acceptance length of this target can be trusted"
    )
    return 0 if passed else 1


def require_lossless(target: Target, config: Config) -> None:
    """UserError when a short self-test fails."""
    checks = self_test(
        target, test_prompt(target, config), nodes=16, rounds=5, depth=6, new_tokens=12
    )
    if failed := [str(check) for check in checks if not check.passed]:
        raise UserError(
            f"decoding on {target.label} in {config.eval.dtype} is not lossless ({'; '.join(failed)}); "
            "`eval/main.py --self-test` shows all checks, please report it"
        )


def results_folder(run_dir: Path, checkpoint: Path, mode: str) -> Path:
    """evals/step-000200 for replay, which every checkpoint gets; its live results lie in a folder below."""
    folder = run_dir / "evals" / checkpoint.resolve().name
    return folder if mode == "replay" else folder / mode


def evaluated(results: Path, checkpoint: Path, settings: str) -> bool:
    """Whether these results are of these weights and were made with these settings."""
    file = results / "results.json"
    if not file.exists():
        return False
    found = read_results(file)
    return (found["checkpoint"]["fingerprint"], found.get("settings")) == (
        fingerprint_of(checkpoint),
        settings,
    )


def notes_on(options: EvalConfig, mode: str) -> list[str]:
    """What a reader must know of the settings, a line each; nothing under plain greedy decoding with best-first trees."""
    notes = []
    settings = ", ".join(f"eval.{k}={v:g}" for k, v in Sampler.of(options).settings.items())
    if settings and mode == "replay":
        notes.append(
            f"Replay measures plain greedy decoding; {settings} applies to the other modes only."
        )
    elif settings:
        notes.append(f"Every decoder picks its tokens with {settings}.")
    if options.keep_chain:
        notes.append("Every tree holds the drafter's chain (eval.keep_chain).")
    return notes


def settings_of(config: Config, mode: str) -> str:
    """A fingerprint of what a result depends on beside the weights."""
    options = config.eval.model_dump()
    live_only = {"live_prompts", *(f.name for f in fields(Sampler))}
    return fingerprint(
        {k: str(v) for k, v in options.items() if mode != "replay" or k not in live_only}
    )


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


def load(
    folder: Path, sets: dict[str, ShardReader], device: torch.device, dtype: torch.dtype
) -> DFlashDrafter:
    """A drafter, checked against the states it is about to read. UserError names both sides."""
    try:
        drafter = load_drafter(folder, dtype)
    except ValueError as error:
        raise UserError(str(error)) from None
    for reader in sets.values():
        manifest: Manifest = reader.manifest
        require(
            manifest,
            reader.folder,
            target_layer_ids=drafter.shape.target_layer_ids,
            num_target_layers=drafter.shape.num_target_layers,
            mask_token_id=drafter.shape.mask_token_id,
            hidden_size=drafter.config.hidden_size,
            vocab_size=drafter.config.vocab_size,
        )
    return drafter.to(device).eval().requires_grad_(False)


if __name__ == "__main__":
    sys.exit(main_guard(main))
