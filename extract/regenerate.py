"""The target answers the prompts itself.

A drafter is trained on what it will have to predict: the target's own answers (design.md 3). Work is planned before the
first token: prompts are sorted by length into batches, each batch is one file, and a finished file is never redone.
A chat with several user turns is answered turn by turn, each turn with the answers before it in place.

    conversations/turn0-batch-000000.jsonl     one JSON object per answer, see `extract.prompts.Row`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from configs.provenance import atomic_write_text, fingerprint
from extract.cache import cache_argument, new_cache
from extract.choose import GREEDY, Sampler
from extract.prompts import Chat, Message, Renderer, Row, UnmaskableChat, user_turns
from extract.target import Target
from extract.waiting import made_by

# Answers one batch of prompts with a seed of its own: token ids -> (answer ids with the stop token, reason).
Reason = Literal["stop", "length"]
Answerer = Callable[[Sequence[list[int]], int], list[tuple[list[int], Reason]]]


@torch.inference_mode()
def decode_batch(
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    sampler: Sampler = GREEDY,
    generators: Sequence[torch.Generator] | None = None,
) -> list[tuple[list[int], Reason]]:
    """Plain autoregressive decoding of a batch, padded on the left; finished rows leave the batch.

    With a generator for each prompt, a sampled answer does not depend on the prompts beside it.
    Returns for each prompt its new tokens, the stop token included, and why it ended.
    """
    device, stop = target.device, target.stop_ids
    longest = max(map(len, prompts))
    # A row is padded with its own first token: the mask hides it from the target, and the repetition penalty, which
    # counts a token once, reads nothing new.
    ids = torch.tensor([p[:1] * (longest - len(p)) + p for p in prompts], device=device)
    text = ids
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = torch.arange(longest, device=device)[None, :] >= longest - lengths[:, None]
    position = (mask.long().cumsum(1) - 1).clamp(min=0)

    cache = new_cache(target.config)
    cache_kwargs = cache_argument(target.decoder, cache)
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    for step in range(max_new_tokens):
        hidden = target.decoder(
            input_ids=ids, attention_mask=mask.long(), position_ids=position, **cache_kwargs
        ).last_hidden_state[:, -1]
        tokens = sampler.choose(
            target.logits(hidden), text, [generators[row] for row in alive] if generators else None
        )
        for row, token in zip(alive, tokens.tolist(), strict=True):
            # a row that has ended stays in the batch until the next compaction; what it says is not recorded
            if not (answers[row] and answers[row][-1] in stop):
                answers[row].append(token)
        if step + 1 == max_new_tokens:
            break
        going = [i for i, row in enumerate(alive) if answers[row][-1] not in stop]
        if not going:
            break
        ids, position = tokens[:, None], position[:, -1:] + 1
        if len(going) <= 0.85 * len(alive):  # compaction copies the cache, so not at every stop
            keep: Any = torch.tensor(going, device=device)
            cache.reorder_cache(
                keep
            )  # selects batch rows in every kind of layer, recurrent ones too
            ids, position, mask, text = ids[keep], position[keep], mask[keep], text[keep]
            alive = [alive[i] for i in going]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
        text = torch.cat([text, ids], dim=1)
    return [(a, "stop" if a[-1] in stop else "length") for a in answers]


def regenerate(
    chats: Sequence[Chat],
    renderer: Renderer,
    answer: Answerer,
    folder: Path,
    *,
    settings: dict[str, object],
    seed: int,
    batch_size: int,
    max_prompt_tokens: int,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Answer every turn of every chat; returns the rows in chat order and (reason, id) of turns that were dropped.

    `settings` is whatever changes an answer (target fingerprint, temperature, limits...). Its fingerprint is in every
    file: answers made under other settings are redone. With several processes, process r answers batches
    r, r+world, ... and every process waits for the others' files between turns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dropped: list[tuple[str, str]] = []
    chats, turns = _answerable(chats, dropped)
    histories: list[list[Message]] = [list(preamble) for preamble, _ in turns]
    rows: dict[str, Row] = {}
    open_chats = list(range(len(chats)))
    for turn in range(max((len(groups) for _, groups in turns), default=0)):
        wanted: list[tuple[int, list[int]]] = []
        for c in open_chats:
            if turn >= len(turns[c][1]):
                continue
            histories[c] += turns[c][1][turn]
            prompt = renderer.prompt_ids(histories[c])
            if len(prompt) > max_prompt_tokens:
                dropped.append(
                    (f"prompt longer than {max_prompt_tokens} tokens", f"{chats[c].id}#{turn}")
                )
            else:
                wanted.append((c, prompt))
        wanted.sort(key=lambda item: (len(item[1]), item[0]))
        batches = [wanted[i : i + batch_size] for i in range(0, len(wanted), batch_size)]
        stamp = fingerprint(
            {
                "settings": settings,
                "seed": seed,
                "turn": turn,
                "prompts": [[chats[c].id, p] for c, p in wanted],
            }
        )
        files = [folder / f"turn{turn}-batch-{b:06d}.jsonl" for b in range(len(batches))]
        # longest first: what does not fit shows at once, and the last batches are the short ones
        for b in reversed(range(len(batches))):
            if b % world == rank and read_batch(files[b], stamp) is None:
                answers = answer([p for _, p in batches[b]], hash((seed, turn, b)))
                _write_batch(files[b], stamp, chats, turn, batches[b], answers)
            if progress:
                progress(sum(len(x) for x in batches[b:]), len(wanted))
        answered: list[int] = []
        for b, file in enumerate(files):
            made = made_by(b % world, world, file.name, partial(read_batch, file, stamp))
            for (c, _), row in zip(batches[b], made, strict=True):
                rows[row.id] = row
                histories[c] += [
                    {
                        "role": "assistant",
                        "content": renderer.tokenizer.decode(
                            row.answer_ids.tolist(), skip_special_tokens=True
                        ),
                    }
                ]
                answered.append(c)
        open_chats = sorted(answered)
    ordered = [
        rows[f"{chat.id}#{t}"]
        for chat, (_, groups) in zip(chats, turns, strict=True)
        for t in range(len(groups))
        if f"{chat.id}#{t}" in rows
    ]
    return ordered, dropped


def _answerable(
    chats: Sequence[Chat], dropped: list[tuple[str, str]]
) -> tuple[list[Chat], list[tuple[list[Message], list[list[Message]]]]]:
    """The chats that can be answered turn by turn, with their turns; the others go to `dropped`."""
    kept, turns = [], []
    for chat in chats:
        try:
            turns.append(user_turns(chat))
            kept.append(chat)
        except UnmaskableChat as error:
            dropped.append((error.reason, chat.id))
    return kept, turns


def _write_batch(
    file: Path,
    stamp: str,
    chats: Sequence[Chat],
    turn: int,
    batch: Sequence[tuple[int, list[int]]],
    answers: Sequence[tuple[list[int], Reason]],
) -> None:
    lines = []
    for (c, prompt), (ids, reason) in zip(batch, answers, strict=True):
        row = Row.of(f"{chats[c].id}#{turn}", chats[c].id, turn, prompt, ids, reason)
        lines.append(json.dumps(row.to_json()))
    head = {"stamp": stamp, "answers": len(batch), "sha256": _digest(lines)}
    atomic_write_text(file, "\n".join([json.dumps(head), *lines]) + "\n")


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_batch(file: Path, stamp: str | None) -> list[Row] | None:
    """The rows of a finished file, or None when it is missing, damaged or made under other settings."""
    found = _batch(file)
    return found[1] if found and stamp in (None, found[0]) else None


def _batch(file: Path) -> tuple[str, list[Row]] | None:
    """(stamp, rows) of a file, None when it is missing or damaged."""
    try:
        head, *lines = file.read_text(encoding="utf-8").splitlines()
        header = json.loads(head)
        if (header["answers"], header["sha256"]) != (len(lines), _digest(lines)):
            return None
        return header["stamp"], [Row.of(**json.loads(line)) for line in lines]
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def answers_so_far(folder: Path) -> list[Row]:
    """The rows of the finished batches, by chat and turn; nothing needs to be finished or known.

    Of each turn, those that were made under the same settings as its newest file: an earlier run may have left others.
    """
    turns: dict[str, list[tuple[int, str, list[Row]]]] = {}
    for file in folder.glob("turn*-batch-*.jsonl"):
        if found := _batch(file):
            age = file.stat().st_mtime_ns
            turns.setdefault(file.name.partition("-")[0], []).append((age, *found))
    rows: list[Row] = []
    for batches in turns.values():
        _, newest, _ = max(batches, key=lambda batch: batch[0])
        rows += [row for _, stamp, some in batches if stamp == newest for row in some]
    return sorted(rows, key=lambda row: (row.chat_id, row.turn))
