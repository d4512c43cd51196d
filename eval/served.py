"""Acceptance length as a running engine counts it: vLLM or SGLang with the exported drafter, on the prompts of live.

Prompts go as token ids, one after the other. The engine tells how many rounds accepted how many drafts, not in which
order, which no number of a row depends on. Its rounds are whole: where a stop token or the length limit cuts an answer's
last round, live counts what was left of it and an engine all that it accepted. Both are reported.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from configs.load import UserError
from configs.schema import Config
from eval.engines import Engine, Served
from eval.live import questions
from eval.metrics import Answer, Row, summarize
from extract.choose import Sampler
from extract.loops import REPETITIVE, repetition_rate
from extract.shards import ShardReader


def served_sets(
    config: Config, engine: Engine, block_size: int, sets: dict[str, ShardReader]
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per data set, and notes on the server and on the answers. UserError when it cannot be the right server."""
    if engine.block_size != block_size:
        raise UserError(
            f"the server ({engine.name}) drafts {engine.block_size - 1} tokens a round and the checkpoint "
            f"{block_size - 1}; start it with this checkpoint and as many speculative tokens"
        )
    options, sampler = config.eval, Sampler.of(config.eval)
    rows: list[dict[str, Any]] = []
    notes = [f"Served by {engine.name}, which does not name its drafter."]
    for name, reader in sets.items():
        asked = questions(config, reader)
        if not rows:
            engine.answer(asked[0].prompt, 8, sampler, config.seed)  # warm-up
        served = {
            q.id: engine.answer(q.prompt, options.max_new_tokens, sampler, config.seed + i)
            for i, q in enumerate(asked)
        }
        row = summarize_served(
            served, dataset=name, temperature=options.temperature, block_size=block_size
        )
        rows.append(row.as_dict())
        tau = sum(len(s.tokens) - 1 for s in served.values()) / row.rounds if row.rounds else 0.0
        notes.append(
            f"{name}: by the tokens that ended up in answers, as live counts, tau is {tau:.3f}."
        )
        if sampler.plain:
            pairs = [(served[q.id].tokens, q.answer) for q in asked]
            others = sum(ours[:1] != stored[:1] for ours, stored in pairs)
            if others > max(len(pairs) / 2, 2):
                raise UserError(
                    f"{name}: {others} of {len(pairs)} answers of the server ({engine.name}) do not even begin "
                    f"like the stored ones; serve this run's target, {reader.manifest.target.id}"
                )
            same = sum(ours == stored for ours, stored in pairs)
            notes[-1] += (
                f" {same} of {len(pairs)} answers equal the stored greedy ones token for token; "
                "engines settle near-ties in their own way."
            )
    return rows, notes


def summarize_served(
    served: dict[str, Served], *, dataset: str, temperature: float, block_size: int
) -> Row:
    """A row from counts, by prompt. UserError where they cannot be those of the answers."""
    cut = {id: 1 + len(s.accepted) + sum(s.accepted) - len(s.tokens) for id, s in served.items()}
    for id, s in served.items():
        if not 0 <= cut[id] < block_size:
            raise UserError(
                f"data set {dataset}: the server counts rounds of {len(s.tokens) + cut[id]} tokens for an answer "
                f"of {len(s.tokens)}; it decoded without drafts, as near its context limit: raise that limit"
            )
    answers = [
        Answer(
            prompt_id=id,
            committed=tuple(m + 1 for m in s.accepted),
            accepted=s.accepted,
            tokens=len(s.tokens) + cut[id],
            phases=None,
            drafted=s.drafted,
        )
        for id, s in served.items()
    ]
    row = summarize(
        answers,
        dataset=dataset,
        decoder="dflash",
        budget=None,
        temperature=temperature,
        block_size=block_size,
        lossless=None,
        repetitive_answers=sum(repetition_rate(s.tokens) > REPETITIVE for s in served.values()),
    )
    tokens = sum(len(s.tokens) for s in served.values())
    times = [s.seconds for s in served.values() if s.seconds is not None]
    timed = len(times) == len(served) and math.fsum(times) > 0
    return dataclasses.replace(
        row,
        tokens=tokens,
        tokens_per_second=(tokens - len(served)) / math.fsum(times) if timed else None,
        cut_rounds=sum(c > 0 for c in cut.values()),
    )
