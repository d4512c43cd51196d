"""Answer the prompts with the target and store its hidden states.

    python extract/main.py --config configs/smollm2-demo.yaml
    accelerate launch --num_processes 8 extract/main.py --config configs/qwen3-8b.yaml

Two things come out in the run folder: the training states (`states/`) and, for every held-out set, the states of the
target's own greedy answers in the evaluation's precision (`eval-sets/NAME/states/`), from which replay computes
acceptance lengths without the target. Running the same command again goes on where it stopped. `--dry-run` says what it
will cost, `--describe` what there is, `--verify` whether the disk has kept it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from configs.load import UserError, add_arguments, config_from_args, main_guard, resolve_input
from configs.provenance import FolderLock, lock_owner, open_run_dir
from extract.benchmarks import BENCHMARKS, table
from extract.connector import Connector, serve_command
from extract.describe import describe, shared_prompts
from extract.locate import (
    inspect,
    load_model_config,
    load_stop_ids,
    load_tokenizer,
    locate,
    unpack_gguf,
)
from extract.manifest import held_out_folders, read_manifest
from extract.price import price_list
from extract.prompts import Chat, Renderer, Report, load_chats
from extract.server import Server
from extract.shards import verify
from extract.skeleton import load_skeleton
from extract.stage import Stage, left_out, say
from extract.target import load_target
from extract.vllm_files import FOLDER
from extract.window import released_in


def main(argv: Sequence[str] | None = None) -> int | None:
    args = parser().parse_args(argv)
    config = config_from_args(args)
    run_dir = Path(config.run_dir)
    if args.verify:
        return verify_run(run_dir)

    vllm = config.extract.backend == "vllm"
    if args.vllm_command and not vllm:
        raise UserError("--vllm-command is for extract.backend=vllm, and the config says hf")
    if vllm and not (args.server or args.dry_run or args.describe or args.vllm_command):
        raise UserError(
            "extract.backend is vllm and no server is named; start one with the command that --vllm-command "
            "prints and give its address with --server"
        )

    # Everything a person can have wrong is looked at before the weights are loaded.
    refuse_shared_sources(config.data.prompts, config.eval.prompts)
    location = unpack_gguf(locate(config.target))
    tokenizer = load_tokenizer(config.target, location)
    model_config = load_model_config(config.target, location)
    spec = inspect(location, model_config, tokenizer, config.drafter)
    if args.vllm_command:
        longest = getattr(model_config, "max_position_embeddings", None)
        print(serve_command(config, location, spec, longest))
        return None
    renderer = Renderer(tokenizer, enable_thinking=config.target.enable_thinking)
    chats, report = load_chats(config.data.prompts, max_samples=config.data.max_samples)
    sets = [
        (Path(name).stem, *load_chats([name], max_samples=config.eval.max_prompts))
        for name in config.eval.prompts
    ]
    warn_contamination(chats, sets)
    say(
        "target",
        f"{spec.label}: {spec.num_layers} layers, hidden {spec.hidden_size}, vocabulary {spec.vocab_size}",
    )
    mask = f"{spec.mask_token_id} {tokenizer.convert_ids_to_tokens(spec.mask_token_id)!r}"
    say("drafter", f"taps {list(spec.target_layer_ids)}, mask token {mask}")
    say(
        "prompts",
        f"{len(chats)} for training; held out: {', '.join(f'{n} {len(c)}' for n, c, _ in sets) or 'none'}",
    )
    for line in report.lines():
        say("", line)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if args.describe:
        if rank == 0:
            stop_ids = load_stop_ids(location, model_config, tokenizer)
            describe(config, renderer, stop_ids, chats, [(n, c) for n, c, _ in sets])
        return None
    if args.dry_run:
        held_out = [c for _, c, _ in sets]
        target = load_skeleton(config.target) if vllm else load_target(config.target)
        prices = price_list(config, spec, target, renderer, chats, held_out, processes=world)
        if rank == 0:
            print("\n".join(prices))
        return None

    with processes_lock(run_dir, rank, world):
        if rank == 0:
            open_run_dir(config, stage="extract", resume=False)
        stage = Stage(config, spec, renderer, rank, world)
        if vllm:
            problems = extract_with_vllm(args.server, stage, chats, report, sets)
        else:
            server = Server(args.server, config, tokenizer) if args.server else None
            problems = extract_here(stage, chats, report, sets, server)
    following = f"accelerate launch train/main.py --config {args.config}"
    if found := [problem for problem in problems if problem]:
        print(
            f"error: {'; '.join(found)}; run the same command again to try them once more, or go on "
            f"without them: {following}",
            file=sys.stderr,
        )
        return 1
    if rank == 0:
        print(f"next: {following}")
    return None


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="extract/main.py",
        description="Answer the prompts with the target and store its hidden states.",
        epilog="example: python extract/main.py --config configs/smollm2-demo.yaml --dry-run\n\n"
        "eval.prompts takes files, hub data sets and these benchmarks (docs/benchmarks.md):\n"
        + table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(out)
    mode = out.add_mutually_exclusive_group()
    mode.add_argument(
        "--dry-run",
        action="store_true",
        help="the price: tokens, hours (from a short run on this machine) and bytes; leave nothing behind",
    )
    mode.add_argument(
        "--describe",
        action="store_true",
        help="what is there, finished or not: lengths, stops, duplicates, loops, and whether the target would say it",
    )
    mode.add_argument("--verify", action="store_true", help="read everything again and check it")
    mode.add_argument(
        "--vllm-command",
        action="store_true",
        help="print how to start vLLM for extract.backend=vllm",
    )
    out.add_argument(
        "--server",
        metavar="URL",
        help="let an OpenAI-compatible server answer the prompts; with extract.backend=vllm it gives the states too",
    )
    return out


def extract_here(
    stage: Stage,
    chats: Sequence[Chat],
    report: Report,
    sets: Sequence[tuple[str, list[Chat], Report]],
    server: Server | None,
) -> list[str | None]:
    """States by the target in this process, answers too unless a server gives them. Returns what Stage.run says."""
    config, run_dir = stage.config, Path(stage.config.run_dir)
    held_out = held_out_folders(config)
    jobs: list[tuple[str, Sequence[Chat], Report, Path]] = [
        (config.eval.dtype, c, r, held_out[name].parent) for name, c, r in sets
    ]
    # With a window the training states end when training does, and until then checkpoints are to be evaluated.
    last = config.extract.window_gb is not None
    jobs.insert(len(jobs) if last else 0, (config.target.dtype, chats, report, run_dir))
    problems, target = [], None
    for dtype, some, said, folder in jobs:
        if target is None or str(target.dtype) != f"torch.{dtype}":
            target = None  # one at a time
            target = load_target(config.target, dtype=dtype)
        held = folder != run_dir
        problems.append(
            stage.run(target, some, said, folder, held_out=held, server=None if held else server)
        )
    return problems


def extract_with_vllm(
    url: str,
    stage: Stage,
    chats: Sequence[Chat],
    report: Report,
    sets: Sequence[tuple[str, list[Chat], Report]],
) -> list[str | None]:
    """All answers and states from one vLLM server; the weights of the target's blocks stay on the disk.

    Returns what Stage.run says of each set.
    """
    config, run_dir = stage.config, Path(stage.config.run_dir)
    files, target = run_dir / FOLDER, load_skeleton(config.target)
    connector = Connector(url, target, stage.spec, config)
    server = Server(url, config, target.tokenizer, states_folder=files)
    problems = [stage.run(target, chats, report, run_dir, server=server, connector=connector)]
    held_out = held_out_folders(config)
    greedy = Server(url, config, target.tokenizer, held_out=True, states_folder=files)
    for name, set_chats, set_report in sets:
        folder = held_out[name].parent
        problems.append(
            stage.run(
                target,
                set_chats,
                set_report,
                folder,
                held_out=True,
                server=greedy,
                connector=connector,
            )
        )
    if stage.rank == 0:  # all shards are there; what a killed run left behind is not needed
        shutil.rmtree(files, ignore_errors=True)
    return problems


@contextmanager
def processes_lock(run_dir: Path, rank: int, world: int) -> Iterator[None]:
    """Hold this process's share of a run folder, so that no batch or shard has two owners.

    A share is a rank and the number of processes. UserError when another living process has the same, or any share of
    another number of processes.
    """
    with FolderLock(run_dir, f"extract-{rank}-of-{world}"):
        for lock in sorted(run_dir.glob(".lock-extract-*")):
            stage = lock.name.removeprefix(".lock-")
            if not stage.endswith(f"-of-{world}") and (pid := lock_owner(run_dir, stage)):
                raise UserError(
                    f"another {stage} process (pid {pid}) is working in {run_dir}; wait for it to end, or stop it, "
                    "and run the same command again"
                )
        yield


def refuse_shared_sources(training: Sequence[str], held_out: Sequence[str]) -> None:
    """UserError for a set that is trained on and held out, and for two held-out sets of one name."""

    def source(name: str) -> object:
        path = resolve_input(name, None)
        if path is not None and path.is_file():
            return path.resolve()
        if name in BENCHMARKS:
            return BENCHMARKS[name].dataset, BENCHMARKS[name].split
        dataset, _, split = name.partition(":")
        return dataset, split or "train"

    trained, called = {source(name): name for name in training}, dict[str, str]()
    for name in held_out:
        if source(name) in trained:
            raise UserError(
                f"{name} of eval.prompts is also trained on, as {trained[source(name)]} of data.prompts; "
                "take it out of one of them"
            )
        if (stem := Path(name).stem) in called:
            raise UserError(
                f"{called[stem]} and {name} of eval.prompts would both be called {stem}; rename one"
            )
        called[stem] = name


def warn_contamination(
    chats: Sequence[Chat], sets: Sequence[tuple[str, list[Chat], Report]]
) -> None:
    """Held-out prompts that are also training prompts make tau too good; say which set and how many."""
    for name, held_out, _ in sets:
        shared = shared_prompts(chats, held_out)
        if shared:
            print(
                f"warning: {len(shared)} of {len(held_out)} prompts of {name} are training prompts too "
                f"({', '.join(shared[:3])}); its acceptance length will flatter the drafter",
                file=sys.stderr,
            )


def verify_run(run_dir: Path) -> int:
    """Read every states folder of the run again; 0 when all is as its manifest says and no sample is left out."""
    folders = [run_dir / "states", *sorted(run_dir.glob("eval-sets/*/states"))]
    problems, missing = 0, []
    for folder in folders:
        try:
            found = verify(folder, released=(gone := released_in(folder)))
        except UserError as error:
            found = [str(error)]
        for problem in found:
            print(f"error: {problem}", file=sys.stderr)
        if not found:
            manifest = read_manifest(folder)
            totals = manifest.totals
            missing += [text] if (text := left_out(folder, manifest)) else []
            say(
                "verified",
                f"{folder}: {totals.samples} samples, {totals.tokens:,} tokens, {totals.bytes:,} bytes"
                + (
                    f"; {gone} of {len(manifest.shards)} shards were read and deleted"
                    if gone
                    else ""
                ),
            )
        problems += len(found)
    for text in missing:
        print(f"error: {text}; run extract/main.py again to try them once more", file=sys.stderr)
    return 2 if problems else 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
