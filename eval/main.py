"""Measure the acceptance length of checkpoints.

    python eval/main.py --config configs/smollm2-demo.yaml --checkpoint all --mode replay
    python eval/main.py --config configs/smollm2-demo.yaml --checkpoint latest --mode live
    python eval/main.py --config configs/smollm2-demo.yaml --checkpoint latest --mode served --server http://HOST:PORT
    python eval/main.py --config configs/smollm2-demo.yaml --trace 3
    python eval/main.py --config configs/smollm2-demo.yaml --doctor
    python eval/main.py --config configs/smollm2-demo.yaml --self-test
    python eval/main.py compare runs/a runs/b

`replay` computes acceptance from the stored states of the target's own greedy answers, without the target, for DFlash and
every tree budget at once. `live` decodes with the target: plain, DFlash, DDTree, same prompts, and compares every greedy
answer with plain decoding token by token. `served` lets a running vLLM or SGLang, started with the checkpoint as its
drafter, decode the prompts of `live`, and reads acceptance from the engine's own counters. eval.temperature and its kin
apply to live and served.

`--trace N` measures nothing: it decodes N held-out prompts, chain and largest tree, and writes evals/STEP/trace.html,
where the rounds can be looked at one by one. `--doctor` measures the causes of a low tau that look alike and names the
one that it finds (eval/doctor.py). `--self-test` proves on the target itself, in the precision of eval.dtype,
that drafts leave no trace; live decoding starts with a short form of it. `compare` says from their results whether one
drafter is better than another.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.load import UserError, add_arguments, config_from_args, main_guard
from configs.provenance import FolderLock, LockHeldError, atomic_write_text, provenance
from configs.schema import Config, EvalConfig
from eval import compare, doctor
from eval.best import choose_best
from eval.card import add_to_card
from eval.decode import Decoded
from eval.done import evaluated, fingerprint_of, lock_name, reported, results_folder, settings_of
from eval.engines import connect
from eval.live import live_sets
from eval.loading import (
    checked_shape,
    checkpoints,
    held_out_sets,
    load_checked,
    step_number,
)
from eval.metrics import MODES
from eval.replay import replay_sets
from eval.report import terminal_table, write_report
from eval.results import invalid_rows, latest_results, read_results
from eval.selftest import describe, self_test, short_test, test_prompt
from eval.served import served_sets
from eval.trace import choose, page, trace
from eval.track import log_results
from extract.choose import Sampler
from extract.head import load_head
from extract.manifest import require
from extract.shards import ShardReader
from extract.target import DTYPES, Target, load_target, pick_device
from train.finished import DONE

# rows, what the comparison with plain decoding found, notes
Measured = tuple[list[dict[str, Any]], dict[str, Any] | None, list[str]]


def main(argv: list[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:
        return compare.main(argv[1:])
    args = parser().parse_args(argv)
    config = config_from_args(args)
    if args.self_test:
        return run_self_test(config)
    if (args.mode == "served") != bool(args.server):
        raise UserError("--mode served and --server URL go together; give both or neither")
    if args.trace is not None and (args.trace < 1 or args.server):
        raise UserError("--trace N decodes N prompts here, without a server; N is at least 1")
    if args.server and args.checkpoint == "all":
        raise UserError("a server has one drafter; give --checkpoint the one it was started with")
    if args.doctor and (args.server or args.trace or args.checkpoint == "all"):
        raise UserError("--doctor looks at one checkpoint, without --server, --trace or all")
    run_dir = Path(config.run_dir)
    folders = checkpoints(run_dir, args.checkpoint)
    if args.doctor:
        return doctor.run(config, folders[0])
    sets = held_out_sets(config)
    if args.trace is not None:
        write_traces(config, folders, sets, args.trace)
        return None
    for note in (notes := notes_on(config.eval, args.mode)):
        print(note)
    measure = measurer(config, args.mode, args.server, sets)
    settings = settings_of(
        config, args.mode, {name: r.manifest for name, r in sets.items()}, args.server
    )
    invalid, best = list[str](), None
    for folder in folders:
        try:
            with FolderLock(run_dir, lock_name(folder, args.mode)):
                out = results_folder(run_dir, folder, args.mode)
                if not args.again and evaluated(out, folder, settings):
                    if not reported(out):  # ended between the two
                        history = [r for r in latest_results(run_dir) if r["mode"] == args.mode]
                        write_report(out, read_results(out / "results.json"), history)
                    print(
                        f"{folder.name} has {args.mode} results in {out}; --again evaluates it anew"
                    )
                else:
                    results = evaluate(config, args, folder, measure, settings, sets, notes)
                    invalid += invalid_rows(results)
                    # now, because training goes on deleting others
                    best = choose_best(run_dir, config, settings)
        except LockHeldError as error:
            if args.checkpoint != "all":
                raise
            print(f"skipped: {error.owner} is evaluating {folder.name}", flush=True)
        except (UserError, FileNotFoundError):
            if args.checkpoint != "all" or (folder / DONE).exists():
                raise
            print(f"{folder.name} went while it was evaluated", flush=True)
    if best := best or choose_best(run_dir, config, settings):
        print(best)
    return 1 if invalid else None


def evaluate(
    config: Config,
    args: argparse.Namespace,
    folder: Path,
    measure: Callable[[Path], Measured],
    settings: str,
    sets: dict[str, ShardReader],
    notes: list[str],
) -> dict[str, Any]:
    """Measure a checkpoint and write its report. Nothing is written before all of it is measured."""
    run_dir, started = Path(config.run_dir), time.monotonic()
    out, weights = results_folder(run_dir, folder, args.mode), fingerprint_of(folder)
    rows, check, found = measure(folder)
    results = {
        "schema": 1,
        "mode": args.mode,
        "checkpoint": {
            "path": str(folder),
            "step": step_number(folder),
            "fingerprint": weights,
        },
        "target": next(iter(sets.values())).manifest.target.model_dump()
        | {
            "dtype": "the server's own" if args.server else config.eval.dtype,
            "enable_thinking": config.target.enable_thinking,
            "template_hash": next(iter(sets.values())).manifest.template_hash[:16],
        },
        "settings": settings,
        "max_new_tokens": config.eval.max_new_tokens,
        "sampling": {} if args.mode == "replay" else Sampler.of(config.eval).settings,
        "provenance": provenance(config, ["python", "eval/main.py", *sys.argv[1:]]),
        "rows": rows,
        "lossless_check": check,
        "notes": [*notes, *found],
    }
    history = [r for r in latest_results(run_dir) if r["mode"] == args.mode]
    write_report(out, results, history)
    of_these_weights = [
        r for r in latest_results(run_dir) if r["checkpoint"]["fingerprint"] == weights
    ]
    add_to_card(folder, of_these_weights)
    log_results(run_dir, config, results)
    print(f"\n{folder.name}, {args.mode}, {time.monotonic() - started:.0f} s")
    print("\n".join([terminal_table(results), *found]))
    print(f"report: {out / 'report.md'}", flush=True)
    for row in invalid_rows(results):
        print(f"error: {row}", file=sys.stderr)
    return results


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="eval/main.py",
        description="Measure the acceptance length of checkpoints. `compare A B`, with a --help of its own, says "
        "whether one is better than the other.",
        epilog="example: python eval/main.py --config configs/smollm2-demo.yaml --checkpoint latest --mode live",
    )
    add_arguments(out)
    out.add_argument(
        "--checkpoint",
        default="latest",
        metavar="WHICH",
        help="latest (unless said), best, all, a step folder's name, or a folder",
    )
    out.add_argument(
        "--mode",
        choices=tuple(MODES),
        default="replay",
        help="from stored states, with the target, or of a running server; unset: replay",
    )
    out.add_argument(
        "--server", metavar="URL", help="of a running vLLM or SGLang, for --mode served"
    )
    out.add_argument(
        "--again", action="store_true", help="evaluate checkpoints that have results already"
    )
    out.add_argument(
        "--trace",
        type=int,
        metavar="N",
        help="decode N prompts, chain and largest tree, and show every round in trace.html",
    )
    out.add_argument(
        "--doctor",
        action="store_true",
        help="tau is low: measure the causes that look alike, and name the bug or the innocent reason",
    )
    out.add_argument(
        "--self-test",
        action="store_true",
        help="no checkpoint: check that decoding on this target is lossless",
    )
    return out


def measurer(
    config: Config, mode: str, server: str | None, sets: dict[str, ShardReader]
) -> Callable[[Path], Measured]:
    """What measures a checkpoint in a mode, with everything loaded that its checkpoints share."""
    if server:
        engine = connect(server)

        def served(folder: Path) -> Measured:
            rows, notes = served_sets(config, engine, 1 + checked_shape(folder, sets).drafts, sets)
            return rows, None, notes

        return served

    device = pick_device(config.target.device)
    dtype = DTYPES[config.eval.dtype]
    head = load_head(next(iter(sets.values())).folder, device=device, dtype=dtype)
    if mode == "replay":
        return lambda folder: (
            replay_sets(config, load_checked(folder, sets, device, dtype), head, sets),
            None,
            [],
        )

    target = checked_target(config, sets)
    reference: dict[str, list[Decoded]] = {}  # plain answers, the same for every checkpoint

    def live(folder: Path) -> Measured:
        drafter = load_checked(folder, sets, device, dtype)
        return *live_sets(config, target, drafter, head, sets, reference), []

    return live


def checked_target(config: Config, sets: dict[str, ShardReader]) -> Target:
    """The target of these states, on which decoding is lossless. UserError when it is not."""
    target = load_target(config.target, dtype=config.eval.dtype)
    for reader in sets.values():
        require(reader.manifest, reader.folder, **{"target.fingerprint": target.fingerprint()})
    require_lossless(target, config)
    return target


def write_traces(
    config: Config, folders: list[Path], sets: dict[str, ShardReader], count: int
) -> None:
    """trace.html of each checkpoint."""
    device, dtype = pick_device(config.target.device), DTYPES[config.eval.dtype]
    prompts = choose(sets, count)
    head = load_head(next(iter(sets.values())).folder, device=device, dtype=dtype)
    target = checked_target(config, sets)
    made = provenance(config, ["python", "eval/main.py", *sys.argv[1:]])
    for folder in folders:
        drafter = load_checked(folder, sets, device, dtype)
        record = trace(config, target, drafter, head, prompts)
        record |= {"checkpoint": folder.resolve().name, "command": made["command"]}
        out = results_folder(Path(config.run_dir), folder, "replay")
        out.mkdir(parents=True, exist_ok=True)
        atomic_write_text(out / "trace.html", page(record | {"time": made["time"]}))
        print(f"{folder.name}: the rounds of {count} prompts are in {out / 'trace.html'}")


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
    if failed := [str(check) for check in short_test(target, config) if not check.passed]:
        raise UserError(
            f"decoding on {target.label} in {config.eval.dtype} is not lossless ({'; '.join(failed)}); "
            "`eval/main.py --self-test` shows all checks, please report it"
        )


if __name__ == "__main__":
    sys.exit(main_guard(main))
