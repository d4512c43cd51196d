"""Replay side by side with live decoding: the same prompts, the same decoders, identical lists, in one run.

    python bench/replay.py --config configs/smollm2-demo.yaml --prompts 2

Needs a run folder with states and a checkpoint (`make demo`). Prints seconds of both and their ratio; stops with status 1
when a list of accepted lengths differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from configs.load import add_arguments, config_from_args, main_guard
from eval.decode import decode, propose_chain, propose_tree
from eval.replay import Replayed, replay
from extract.head import load_head
from extract.shards import Sample, ShardReader
from extract.target import DTYPES, load_target
from train.checkpoint import find_checkpoint
from train.layout import load_drafter

BUDGETS = (16, 32, 64, 128, 256, 512)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time replay against live decoding.")
    add_arguments(parser)
    parser.add_argument("--prompts", type=int, default=2, help="of each held-out set")
    args = parser.parse_args(argv)
    config = config_from_args(args)
    run_dir, dtype = Path(config.run_dir), DTYPES[config.eval.dtype]
    target = load_target(config.target, dtype=config.eval.dtype)
    folder = find_checkpoint(run_dir, "latest")
    drafter = load_drafter(folder, dtype).to(target.device).eval().requires_grad_(False)
    samples: list[Sample] = []
    for name in config.eval.prompts:
        states = run_dir / "eval-sets" / Path(name).stem / "states"
        reader = ShardReader(states)
        samples += [reader[i] for i in range(min(args.prompts, len(reader)))]
    head = load_head(states, device=target.device, dtype=dtype)
    replay(drafter, head, samples[0], BUDGETS)  # warm-up, compiles the tree

    started = time.perf_counter()
    replayed = [replay(drafter, head, sample, BUDGETS) for sample in samples]
    replay_seconds = time.perf_counter() - started
    tokens = sum(next(iter(r.values())).tokens for r in replayed)
    print(
        f"replay: {replay_seconds:.1f} s for {len(samples)} answers, {tokens} tokens, "
        f"the chain and {len(BUDGETS)} trees"
    )

    total, different = 0.0, 0
    for budget in (None, *BUDGETS):
        propose = propose_chain if budget is None else propose_tree(budget)
        started = time.perf_counter()
        for sample, rounds in zip(samples, replayed, strict=True):
            prompt = sample.input_ids[: sample.prompt_tokens].tolist()
            got = decode(
                target, drafter, head, prompt, propose, max_new_tokens=config.eval.max_new_tokens
            )
            live = Replayed(got.committed, got.accepted, len(got.tokens))
            different += live != rounds[budget]
        seconds = time.perf_counter() - started
        total += seconds
        print(
            f"live, {'chain' if budget is None else f'{budget} nodes'}: {seconds:.1f} s", flush=True
        )
    print(
        f"live: {total:.1f} s in all, {total / replay_seconds:.0f} times replay's; "
        f"{different} of {len(samples) * (1 + len(BUDGETS))} lists differ"
    )
    return 1 if different else 0


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main_guard(main))
