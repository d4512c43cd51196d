"""Acceptance lengths from stored states, without the target.

Under greedy decoding the accepted path *is* the target's own answer. So a round that starts at answer token j accepts
the longest prefix of the known continuation that its draft holds, and the whole decode follows from the drafts at the
positions it visits. Every answer position is drafted as an anchor in one training-style forward, which serves the chain
and every tree budget, and ties the training mask to the decoding loop: the lists must be equal (tests).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from eval.metrics import Answer, summarize
from eval.tree import tree_accepted_lengths
from extract.head import TargetHead
from extract.loops import REPETITIVE, repetition_rate
from extract.shards import Sample, ShardReader
from train.blocks import layer_masks, slot_inputs
from train.drafter import DFlashDrafter

# Slots drafted in one forward: bounds the memory of a long answer and changes no number. Blocks do not see each other,
# so attention over many of them at once is mostly masked; a GPU wants the larger products all the same.
HOST_SLOTS, DEVICE_SLOTS = 512, 8192


@dataclass(frozen=True)
class Replayed:
    """One answer under one decoder, as eval.decode would have counted it."""

    committed: list[int]
    accepted: list[int]
    tokens: int


@torch.inference_mode()
def draft_everywhere(
    drafter: DFlashDrafter, head: TargetHead, sample: Sample, first: int
) -> Iterator[Tensor]:
    """Logits [m, D, V] of the blocks anchored at each of the tokens first..T-1 of a sample, m anchors at a time."""
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    shape, head = drafter.shape, head.used_by(drafter.shape)
    length = len(sample.input_ids)
    ids = sample.input_ids.long().to(device)[None]
    position = torch.arange(length, device=device)[None]
    document = torch.zeros_like(position)
    context = drafter.context(sample.hidden_states.to(device, dtype)[None], position)
    step = max(1, (HOST_SLOTS if device.type == "cpu" else DEVICE_SLOTS) // shape.block_size)
    for start in range(first, length, step):
        end = min(start + step, length)  # nothing from here on is seen by these blocks
        anchors = torch.arange(start, end, device=device)[None]
        tokens, positions = slot_inputs(
            ids, position, anchors, shape.block_size, shape.mask_token_id
        )
        masks = layer_masks(drafter, document[:, :end], position[:, :end], anchors)
        below = [(k[:, :, :end], v[:, :, :end]) for k, v in context]
        hidden = drafter.slots(head.embed(tokens).to(dtype), positions, below, masks)
        hidden = hidden.view(end - start, shape.block_size, -1)[:, shape.first :]
        yield head.logits(hidden)


@torch.inference_mode()
def replay(
    drafter: DFlashDrafter,
    head: TargetHead,
    sample: Sample,
    budgets: Sequence[int],
    *,
    keep_chain: bool = False,
) -> dict[int | None, Replayed]:
    """Rounds of the chain (key None) and of every tree budget on one greedy answer (one supervised run at the end).

    sample.hidden_states [T, F] are the target's at the drafter's taps; the answer's m tokens stand at the end. In every
    round `committed` counts the bonus token and `accepted` does not: tau is the mean of committed. Here a random drafter
    with blocks of 4 on a random answer of 6 tokens after a prompt of 3, for a target of width 16 that is tapped twice:

    >>> from transformers import Qwen3Config
    >>> from train.drafter import DraftShape
    >>> config = Qwen3Config(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      num_key_value_heads=1, head_dim=8, vocab_size=20)
    >>> shape = DraftShape(block_size=4, mask_token_id=19, target_layer_ids=(1, 3), num_target_layers=6)
    >>> drafter, table = DFlashDrafter(config, shape), torch.randn(20, 16)
    >>> mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1], dtype=torch.uint8)
    >>> sample = Sample("q1", torch.arange(9, dtype=torch.int32), mask, torch.randn(9, 2 * 16), None)
    >>> rounds = replay(drafter, TargetHead(table, table), sample, budgets=[16, 20 + 20**2 + 20**3])
    >>> list(rounds)                                 # the chain, and trees by size
    [None, 16, 8420]
    >>> 1 + sum(rounds[None].committed)              # all 6 tokens: the first one is the prefill's, of no round
    6
    >>> rounds[8420].accepted                        # a tree of all continuations: 3 drafts and a bonus; what is left
    [3, 1]
    """
    first = sample.prompt_tokens
    continuation = _continuations(sample.input_ids[first:].long(), drafter.shape.drafts)
    accepted: list[Tensor] = []  # [m, 1 + budgets] of each slice
    done = 0
    for logits in draft_everywhere(drafter, head, sample, first):
        text = continuation[done : done + len(logits)]
        done += len(logits)
        chain = (logits.argmax(-1).cpu() == text).long().cumprod(1).sum(1, keepdim=True)
        trees = tree_accepted_lengths(logits, text, budgets, keep_chain=keep_chain)
        accepted.append(torch.cat([chain, trees], dim=1))
    columns = torch.cat(accepted).T.tolist()
    return {key: walk_answer(c) for key, c in zip((None, *budgets), columns, strict=True)}


def _continuations(answer: Tensor, depth: int) -> Tensor:
    """[m] -> [m, depth]: the tokens after each answer token, -1 past the end."""
    padded = torch.cat([answer, answer.new_full((depth,), -1)])
    return padded.unfold(0, depth, 1)[1:]


def walk_answer(accepted: Sequence[int]) -> Replayed:
    """The rounds of a decode, given how many drafts a round at each answer position would accept.

    The first token is the prefill's. A round at position j commits its accepted drafts and a bonus token, or what is
    left of the answer.
    """
    position, last = 0, len(accepted) - 1
    rounds: list[int] = []
    taken: list[int] = []
    while position < last:
        left = last - position
        taken.append(min(accepted[position], left))
        rounds.append(min(accepted[position] + 1, left))
        position += accepted[position] + 1
    return Replayed(rounds, taken, len(accepted))


def replay_sets(
    config: Config, drafter: DFlashDrafter, head: TargetHead, sets: dict[str, ShardReader]
) -> list[dict[str, Any]]:
    """A row per data set and decoder."""
    options = config.eval
    rows = []
    for name, reader in sets.items():
        answers: dict[int | None, list[Answer]] = {key: [] for key in (None, *options.budgets)}
        repetitive = 0
        for sample in (reader[i] for i in range(len(reader))):
            spoken = sample.input_ids[sample.prompt_tokens :].tolist()
            repetitive += repetition_rate(spoken) > REPETITIVE
            rounds = replay(drafter, head, sample, options.budgets, keep_chain=options.keep_chain)
            for key, got in rounds.items():
                size = drafter.shape.drafts if key is None else key
                answers[key].append(
                    Answer(
                        prompt_id=sample.id,
                        committed=tuple(got.committed),
                        accepted=tuple(got.accepted),
                        tokens=got.tokens,
                        phases=None,
                        drafted=size * len(got.committed),
                    )
                )
        rows += [
            summarize(
                got,
                dataset=name,
                decoder="dflash" if key is None else "ddtree",
                budget=key,
                temperature=0.0,
                block_size=drafter.shape.drafts + 1,
                lossless=None,
                repetitive_answers=repetitive,
            ).as_dict()
            for key, got in answers.items()
        ]
    return rows
