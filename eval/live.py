"""Acceptance length by decoding: plain, DFlash, DDTree on the same prompts, each answer compared with plain decoding."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import torch

from configs.schema import Config
from eval.decode import Decoded, decode, propose_chain, propose_tree
from eval.metrics import Answer, summarize
from eval.selftest import near_tie, plain_logits
from extract.choose import Sampler
from extract.head import TargetHead
from extract.loops import REPETITIVE, repetition_rate
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
    count = min(len(reader), config.eval.live_prompts or len(reader))
    return [question(reader, i) for i in range(count)]


def question(reader: ShardReader, index: int) -> Question:
    sample = reader[index]
    ids, first = sample.input_ids.tolist(), sample.prompt_tokens
    return Question(sample.id, ids[:first], ids[first:])


def live_sets(
    config: Config,
    target: Target,
    drafter: DFlashDrafter,
    head: TargetHead,
    sets: dict[str, ShardReader],
    reference: dict[str, list[Decoded]],
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Rows of plain, chain and tree decoding, and what the comparison of their greedy answers found."""
    options, sampler = config.eval, Sampler.of(config.eval)
    allowed = near_tie(target.dtype)  # a forward over a tree rounds otherwise than one over a token
    rows: list[dict[str, Any]] = []
    compared, mismatches, margin = 0, 0, 0.0
    for name, reader in sets.items():
        asked = questions(config, reader)
        prompts = [q.prompt for q in asked]
        if name not in reference:
            decode_batch(target, prompts[:1], 4)  # warm-up
            reference[name] = [
                plain(target, p, config, seeded(config, target, i)) for i, p in enumerate(prompts)
            ]
        plain_answers = [to_answer(q.id, d) for q, d in zip(asked, reference[name], strict=True)]
        repetitive = sum(repetition_rate(d.tokens) > REPETITIVE for d in reference[name])
        base: dict[str, Any] = {
            "dataset": name,
            "temperature": options.temperature,
            "block_size": drafter.shape.drafts + 1,
        }
        rows.append(
            summarize(
                plain_answers, decoder="autoregressive", budget=None, lossless=True,
                repetitive_answers=repetitive, **base,
            ).as_dict()
        )  # fmt: skip
        for budget in (None, *options.budgets):
            propose = (
                propose_chain
                if budget is None
                else propose_tree(budget, keep_chain=options.keep_chain)
            )
            answer = partial(decode, target, drafter, head, propose=propose, sampler=sampler)
            answer(prompts[0], max_new_tokens=8)  # warm-up
            decoded = [
                answer(
                    prompt,
                    max_new_tokens=options.max_new_tokens,
                    generator=seeded(config, target, i),
                )
                for i, prompt in enumerate(prompts)
            ]
            lossless = None
            if sampler.greedy:
                parted = [
                    parting_margin(target, sampler, prompt, d.tokens, plainly.tokens)
                    for prompt, d, plainly in zip(prompts, decoded, reference[name], strict=True)
                    if d.tokens != plainly.tokens
                ]
                lossless = max(parted, default=0.0) <= allowed
                compared += sum(len(d.tokens) for d in reference[name])
                mismatches += len(parted)
                margin = max([margin, *parted])
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
        "contract": "greedy text equals plain greedy decoding token for token, or parts from it at a near-tie "
        f"of at most {allowed} logits",
        "dtype": options.dtype,
        "compared_tokens": compared,
        "answers_that_differ": mismatches,
        "largest_margin": margin,
    }
    return rows, check if sampler.greedy else None


@torch.inference_mode()
def parting_margin(
    target: Target, sampler: Sampler, prompt: list[int], ours: list[int], plainly: list[int]
) -> float:
    """By how much a plain forward prefers its own choice where a greedy answer leaves plain decoding, in logits."""
    same = next((i for i, (a, b) in enumerate(zip(ours, plainly, strict=False)) if a != b), None)
    if same is None:  # one of them ended early, which no rounding explains
        return float("inf")
    prefix = prompt + plainly[:same]
    (logits,) = plain_logits(target, [prefix], [1])
    scores = sampler.scores(logits, torch.tensor([prefix], device=logits.device))[0]
    return float(scores.max() - scores[[ours[same], plainly[same]]].min())


def seeded(config: Config, target: Target, prompt: int) -> torch.Generator:
    """The draws of this prompt, the same for every decoder: all of them take one draw a token, so the texts are close."""
    return torch.Generator(target.device).manual_seed(config.seed + prompt)


def plain(target: Target, prompt: list[int], config: Config, generator: torch.Generator) -> Decoded:
    """Plain autoregressive decoding through transformers' own masks: the reference. Times exclude the prefill."""
    options, sampler = config.eval, Sampler.of(config.eval)
    started = time.perf_counter()
    decode_batch(target, [prompt], 1)
    prefill = time.perf_counter() - started
    started = time.perf_counter()
    tokens, _ = decode_batch(
        target,
        [prompt],
        options.max_new_tokens,
        sampler=sampler,
        generators=[generator],
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
        phases=decoded.seconds,
        drafted=decoded.drafted,
    )
