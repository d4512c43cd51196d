"""What an extraction holds, finished or not: `extract/main.py --describe`. Reads; writes nothing.

One fact a line, and the name of its set in front, so that `grep` finds it. Answers are counted as the target gave them:
in a sample with several turns each supervised stretch is one, and its prompt is all that precedes it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from configs.load import UserError
from configs.schema import Config
from extract.greedy import Share, from_stored_states, from_target
from extract.loops import REPETITIVE, repetition_rate
from extract.manifest import MANIFEST, Manifest, read_manifest
from extract.price import amount
from extract.prompts import (
    Chat,
    MaskedSample,
    Renderer,
    UnmaskableChat,
    mask_answers,
    merge_turns,
    user_turns,
)
from extract.regenerate import answers_so_far
from extract.shards import ShardReader, noted
from extract.target import Target, load_target, pick_device
from extract.window import released_in

LOW = 0.8  # share of greedy choices below which answers that should be greedy are somebody else's
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Stored:
    """One set as it lies on the disk; `samples` can be read again and again."""

    name: str
    states: Path
    progress: str
    manifest: Manifest | None
    samples: ShardReader | list[MaskedSample]
    source: str  # "given" for the files' answers, else who gave them
    greedy: bool
    target_dtype: str

    def tokens(self) -> Iterator[tuple[Ids, Ids]]:
        """(input_ids, loss_mask), both [T], of each sample; no states are read."""
        if not isinstance(self.samples, ShardReader):
            for s in self.samples:
                yield np.array(s.input_ids, np.int32), np.array(s.loss_mask, np.int32)
            return
        lengths = iter(self.samples.lengths)
        for ids, mask in self.samples.iter_tokens():
            start = 0
            while start < len(ids):
                end = start + next(lengths)
                yield ids[start:end].numpy(), mask[start:end].numpy().astype(np.int32)
                start = end


@dataclass
class Counts:
    """What one pass over the tokens finds."""

    stop_ids: frozenset[int]
    max_length: int
    samples: int = 0
    tokens: int = 0
    anchors: int = 0  # a supervised token whose successor is supervised: where a block may start
    anchors_within: int = 0  # of them, those that training does not cut off
    stopped: int = 0
    loops: int = 0
    prompts: list[int] = field(default_factory=list)  # tokens
    answers: list[int] = field(default_factory=list)  # tokens, the stop token included
    seen_prompts: set[bytes] = field(default_factory=set)
    seen_answers: set[bytes] = field(default_factory=set)

    def add(self, ids: Ids, mask: Ids) -> None:
        self.samples += 1
        self.tokens += len(ids)
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            answer = ids[start:end]
            self.prompts.append(start)
            self.answers.append(end - start)
            self.anchors += end - start - 1
            self.anchors_within += max(0, min(end, self.max_length) - start - 1)
            self.stopped += int(answer[-1]) in self.stop_ids
            self.loops += repetition_rate(answer.tolist()) > REPETITIVE
            self.seen_prompts.add(hashlib.blake2b(ids[:start].tobytes(), digest_size=16).digest())
            self.seen_answers.add(hashlib.blake2b(answer.tobytes(), digest_size=16).digest())

    def lines(self) -> Iterator[tuple[str, str]]:
        count, supervised = len(self.answers), sum(self.answers)
        yield "samples", f"{self.samples:,}, {self.tokens:,} tokens"
        yield (
            "supervised",
            f"{supervised:,} tokens, {supervised / self.tokens:.1%}, in {count:,} answers",
        )
        yield "prompt", spread(self.prompts)
        yield "answer", spread(self.answers)
        yield (
            "ended",
            f"{self.stopped:,} stop, {count - self.stopped:,} length ({_of(count - self.stopped, count)} cut)",
        )
        prompts, answers = count - len(self.seen_prompts), count - len(self.seen_answers)
        yield (
            "duplicates",
            f"{prompts:,} prompts ({_of(prompts, count)}), {answers:,} answers ({_of(answers, count)})",
        )
        yield (
            "loops",
            f"{self.loops:,} answers ({_of(self.loops, count)}) repeat over {REPETITIVE:.0%} of their 8-grams",
        )
        yield (
            "anchors",
            f"{self.anchors:,} usable, {self.anchors_within:,} within train.max_length {self.max_length}",
        )


def spread(lengths: Sequence[int]) -> str:
    """Quantiles of token counts; each is a length that occurs."""
    at = np.quantile(lengths, [0, 0.1, 0.5, 0.9, 0.99, 1], method="inverted_cdf").astype(int)
    names = ("min", "p10", "p50", "p90", "p99", "max")
    return "tokens: " + ", ".join(f"{n} {v:,}" for n, v in zip(names, at, strict=True))


def _of(part: int, whole: int) -> str:
    return f"{part / whole:.1%}"


def shared_prompts(chats: Sequence[Chat], held_out: Sequence[Chat]) -> list[str]:
    """Ids of the held-out chats whose questions are asked in training too, whatever case and spacing."""

    def key(chat: Chat) -> str:
        texts = [str(m.get("content")) for m in chat.messages if m.get("role") == "user"]
        return " ".join(" ".join(texts).casefold().split())

    seen = {key(chat) for chat in chats}
    return [chat.id for chat in held_out if key(chat) in seen]


def describe(
    config: Config,
    renderer: Renderer,
    stop_ids: frozenset[int],
    chats: Sequence[Chat],
    held_out: Sequence[tuple[str, Sequence[Chat]]],
) -> None:
    """Print the lines of the training set and of each held-out set, then ask for the greedy shares."""
    run_dir, found = Path(config.run_dir), []
    for name, set_chats in [("training", chats), *held_out]:
        folder = run_dir if name == "training" else run_dir / "eval-sets" / name
        stored = read_set(config, renderer, stop_ids, set_chats, folder, name=name)
        _say(name, "progress", stored.progress)
        if len(stored.samples):
            counts = Counts(stop_ids, config.train.max_length)
            for ids, mask in stored.tokens():
                counts.add(ids, mask)
            for what, text in counts.lines():
                _say(name, what, text)
            found.append(stored)
        if name != "training":
            shared = shared_prompts(chats, set_chats)
            ids_of_some = f" ({', '.join(shared[:3])})" if shared else ""
            _say(
                name,
                "contaminated",
                f"{len(shared)} of {len(set_chats)} prompts are training prompts too{ids_of_some}",
            )
    _greedy_lines(config, found)


def read_set(
    config: Config,
    renderer: Renderer,
    stop_ids: frozenset[int],
    chats: Sequence[Chat],
    folder: Path,
    *,
    name: str,
) -> Stored:
    """The states when they are complete, else the answers there are so far. UserError when damaged."""
    training, states = name == "training", folder / "states"
    manifest = None
    if (states / MANIFEST).exists():
        manifest = read_manifest(states, incomplete_ok=True)
        made = manifest.answers
        source, greedy, dtype = made.source, made.greedy, manifest.target_dtype
    else:
        source = "regenerated" if config.data.regenerate or not training else "given"
        greedy = source != "given" and (not training or config.data.temperature == 0)
        dtype = config.target.dtype if training else config.eval.dtype
    samples: ShardReader | list[MaskedSample]
    gone = released_in(states)
    if manifest and manifest.complete and not gone:
        samples = ShardReader(states)
        progress = f"complete: {len(manifest.shards)} shards, {amount(manifest.totals.bytes)}"
    else:
        samples, answered = _answers(renderer, stop_ids, chats, folder, source, merge=training)
        progress = f"unfinished: {answered}, {_states_so_far(states, manifest, samples)}"
        if gone:
            progress += f", {gone} of them read by training and deleted"
    return Stored(name, states, progress, manifest, samples, source, greedy, dtype)


def _answers(
    renderer: Renderer,
    stop_ids: frozenset[int],
    chats: Sequence[Chat],
    folder: Path,
    source: str,
    *,
    merge: bool,
) -> tuple[list[MaskedSample], str]:
    """What will be extracted as far as it is known, and how far that is."""
    rows, wanted = [], 0
    for chat in chats:
        try:
            if source == "given":
                rows += mask_answers(renderer, chat, set(stop_ids))
            else:
                wanted += len(user_turns(chat)[1])
        except UnmaskableChat:  # extraction drops it and says so
            continue
    if source == "given":
        text = f"{len(rows):,} answers in the files"
    else:
        rows = answers_so_far(folder / "conversations")
        text = f"{len(rows):,} of at most {wanted:,} answers"
    rows = [row for row in rows if len(row.answer_ids) > 1]
    if merge:
        return merge_turns(rows), text
    return [MaskedSample(row.id, row.input_ids, row.loss_mask) for row in rows], text


def _states_so_far(states: Path, manifest: Manifest | None, samples: list[MaskedSample]) -> str:
    done = [
        entry
        for file in sorted(states.glob("shard-*.json"))
        if manifest is not None
        and (
            entry := noted(states, file.with_suffix(".safetensors").name, manifest.plan_fingerprint)
        )
    ]
    if not done:
        return "no states yet"
    tokens, total = sum(e.tokens for e in done), sum(len(s.input_ids) for s in samples)
    return f"states of {tokens:,} of {total:,} tokens in {len(done)} shards"


def _greedy_lines(config: Config, sets: Sequence[Stored]) -> None:
    """One line a set. The target is loaded at most once for each dtype that the sets were made in."""
    loaded: Target | None = None
    for stored in sets:
        if isinstance(stored.samples, ShardReader) and stored.samples.manifest.last_hidden:
            share = from_stored_states(
                stored.samples, stored.states, pick_device(config.target.device)
            )
            _say_share(stored, share, "by the stored last_hidden")
            continue
        if config.extract.backend == "vllm":
            how = "unknown: last_hidden is not stored, and extract.backend=vllm loads no target; --set "
            _say(stored.name, "greedy", f"{how}extract.backend=hf loads it here")
            continue
        try:
            if loaded is None or str(loaded.dtype) != f"torch.{stored.target_dtype}":
                how = f"needs the target, since last_hidden is not stored: loading it in {stored.target_dtype}"
                _say(stored.name, "greedy", how)
                loaded = None  # before the next one, which may not fit beside it
                loaded = load_target(config.target, dtype=stored.target_dtype)
            made_by = stored.manifest.target.fingerprint if stored.manifest else None
            if made_by not in (None, loaded.fingerprint()):
                raise UserError(
                    f"the states were made by a target with the fingerprint {made_by} and "
                    f"{loaded.label} has {loaded.fingerprint()}"
                )
        except UserError as error:
            _say(stored.name, "greedy", f"unknown: {error}")
            continue
        share = from_target(stored.samples, loaded)
        _say_share(stored, share, f"by the target in {stored.target_dtype}")


def _say_share(stored: Stored, share: Share, how: str) -> None:
    _say(
        stored.name,
        "greedy",
        f"{share.value:.2%} of {share.tokens:,} supervised tokens are the target's greedy choice "
        f"({share.samples:,} of {len(stored.samples):,} samples, {how})",
    )
    if share.value >= LOW or not (stored.greedy or stored.source == "given"):
        return  # sampled answers are the target's own and seldom its first choice
    fix = (
        "set data.regenerate"
        if stored.source == "given"
        else "these claim to be its own greedy answers: is it the same target, template and server?"
    )
    print(
        f"warning: {share.value:.0%} of the supervised tokens of {stored.name} are what the target would say; "
        f"drafters trained on other text reach 1.8-3.9 ({fix})",
        file=sys.stderr,
    )


def _say(name: str, what: str, text: str) -> None:
    print(f"{name + ':':<10}{what:<13}{text}", flush=True)
