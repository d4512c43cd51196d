"""Acceptance length by decoding: plain, DFlash, DDTree on the same prompts, each answer compared with plain decoding."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from configs.schema import Config
from eval.decode import Decoded, decode, propose_chain, propose_tree
from eval.metrics import REPETITIVE, Answer, repetition_rate, summarize
from extract.head import TargetHead
from extract.regenerate import decode_batch
from extract.shards import ShardReader
from extract.target import Target
from train.drafter import DFlashDrafter


class Question(NamedTuple):
    id: str
    prompt: list[int]
    answer: list[int]  # the target's stored greedy one


def questions(config: Config, reader: ShardReader) -> list[Question]:
    """The held-out prompts of a set that are decoded anew, eval.live_prompts of them."""
    asked = []
    for sample in (
        reader[i] for i in range(min(len(reader), config.eval.live_prompts or len(reader)))
    ):
        ids = sample.input_ids.tolist()
        first = len(ids) - int(sample.loss_mask.sum())
        asked.append(Question(sample.id, ids[:first], ids[first:]))
    return asked


def live_sets(
    config: Config,
    target: Target,
    drafter: DFlashDrafter,
    head: TargetHead,
    sets: dict[str, ShardReader],
    reference: dict[str, list[Decoded]],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of plain, chain and tree decoding, and what the comparison of their answers found."""
    options = config.eval
    rows: list[dict[str, Any]] = []
    compared = mismatches = 0
    for name, reader in sets.items():
        asked = questions(config, reader)
        prompts = [q.prompt for q in asked]
        if name not in reference:
            decode_batch(target, prompts[:1], 4)  # warm-up
            reference[name] = [plain(target, p, config) for p in prompts]
        plain_answers = [to_answer(q.id, d) for q, d in zip(asked, reference[name], strict=True)]
        repetitive = sum(repetition_rate(d.tokens) > REPETITIVE for d in reference[name])
        base: dict[str, Any] = {
            "dataset": name,
            "temperature": options.temperature,
            "block_size": drafter.block_size,
        }
        rows.append(
            summarize(
                plain_answers, decoder="autoregressive", budget=None, lossless=True,
                repetitive_answers=repetitive, **base,
            ).as_dict()
        )  # fmt: skip
        for budget in (None, *options.budgets):
            propose = propose_chain if budget is None else propose_tree(budget)
            decode(target, drafter, head, prompts[0], propose, max_new_tokens=8)  # warm-up
            decoded = [
                decode(
                    target,
                    drafter,
                    head,
                    prompt,
                    propose,
                    max_new_tokens=options.max_new_tokens,
                    temperature=options.temperature,
                    generator=torch.Generator(target.device).manual_seed(config.seed + i),
                )
                for i, prompt in enumerate(prompts)
            ]
            lossless = None
            if options.temperature == 0:
                same = [a.tokens == b.tokens for a, b in zip(decoded, reference[name], strict=True)]
                lossless = all(same)
                compared += sum(len(d.tokens) for d in reference[name])
                mismatches += same.count(False)
            rows.append(
                summarize(
                    [to_answer(q.id, d) for q, d in zip(asked, decoded, strict=True)],
                    decoder="dflash" if budget is None else "ddtree",
                    budget=budget,
                    lossless=lossless,
                    baseline=plain_answers,
                    repetitive_answers=repetitive,
                    **base,
                ).as_dict()
            )
    check = {
        "contract": "greedy text equals plain greedy decoding, token for token",
        "dtype": options.dtype,
        "compared_tokens": compared,
        "answers_that_differ": mismatches,
    }
    return rows, check


def plain(target: Target, prompt: list[int], config: Config) -> Decoded:
    """Plain autoregressive decoding through transformers' own masks: the reference. Times exclude the prefill."""
    options = config.eval
    generator = torch.Generator(target.device).manual_seed(config.seed)
    started = time.perf_counter()
    decode_batch(target, [prompt], 1)
    prefill = time.perf_counter() - started
    started = time.perf_counter()
    tokens, _ = decode_batch(
        target,
        [prompt],
        options.max_new_tokens,
        temperature=options.temperature,
        generator=generator,
    )[0]
    out = Decoded(tokens=tokens)
    out.seconds["verify"] = max(time.perf_counter() - started - prefill, 0.0)
    return out


def to_answer(prompt_id: str, decoded: Decoded) -> Answer:
    return Answer(
        prompt_id=prompt_id,
        committed=tuple(decoded.committed),
        accepted=tuple(decoded.accepted),
        tokens=len(decoded.tokens),
        seconds=sum(decoded.seconds.values()),
        drafted=decoded.drafted,
    )
