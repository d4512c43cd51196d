"""What an extraction costs, before it is paid for: `extract/main.py --dry-run`.

Lengths are counted, rates are measured by a short run of the loaded target on this machine and of the disk under the
run folder, and what cannot be known, how early the answers stop, is taken at its limit: all figures are upper bounds.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path

from configs.load import UserError
from configs.provenance import existing_parent
from configs.schema import Config
from extract.head import head_of
from extract.locate import TargetSpec
from extract.plan import ShardPlan
from extract.prompts import (
    Chat,
    MaskedSample,
    Renderer,
    UnmaskableChat,
    mask_answers,
    merge_turns,
    user_turns,
)
from extract.regenerate import decode_batch
from extract.sample import STORAGE_DTYPES
from extract.shards import estimate_bytes, write_shard
from extract.states import forward_shard
from extract.target import Target

STEPS = 8  # timed steps of decoding
TOKENS = 4096  # of the timed shard on a CPU; a GPU gets extract.batch_tokens
STORAGE = ("bfloat16", "float8_e4m3fn", "float32")


def bytes_per_token(num_taps: int, hidden: int, storage_dtype: str, last_hidden: bool) -> int:
    """Of the states of one token on the disk, its id and mask included."""
    return estimate_bytes(1, num_taps, hidden, STORAGE_DTYPES[storage_dtype], last_hidden)


def amount(size: float) -> str:
    """Bytes in decimal units, as disks are sold: 33.1 TB."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:,.3g} {unit}"


@dataclass(frozen=True)
class Demand:
    """Tokens of one set. `answer_tokens` at most, unless the files give them."""

    prompts: list[list[int]]  # ids, with every user turn of a chat and none of its answers
    prompt_tokens: int
    answer_tokens: int
    apart: int  # tokens when every turn of a chat is a sample of its own, its history repeated
    answers: int
    dropped: int  # chats that extraction will refuse

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @classmethod
    def of_questions(
        cls, renderer: Renderer, chats: Sequence[Chat], max_new_tokens: int, max_prompt_tokens: int
    ) -> Demand:
        """For answers that the target will give: every one may be max_new_tokens long."""
        prompts, answers, apart = [], 0, 0
        for chat in chats:
            try:
                first, turns = user_turns(chat)
                asked = [list(chain(first, *turns[:n])) for n in range(1, len(turns) + 1)]
                found = map(renderer.prompt_ids, asked)
                by_turn = list(takewhile(lambda ids: len(ids) <= max_prompt_tokens, found))
            except UnmaskableChat:  # extraction drops it and says so
                continue
            if by_turn:
                prompts.append(by_turn[-1])
                answers += len(by_turn)
                apart += sum(len(ids) + n * max_new_tokens for n, ids in enumerate(by_turn, 1))
        size, dropped = sum(map(len, prompts)), len(chats) - len(prompts)
        return cls(prompts, size, answers * max_new_tokens, apart, answers, dropped)

    @classmethod
    def of_given(
        cls, renderer: Renderer, chats: Sequence[Chat], stop_ids: frozenset[int]
    ) -> Demand:
        """For the answers in the files: exact."""
        prompts, samples, answers = [], list[MaskedSample](), 0
        for chat in chats:
            try:
                rows = mask_answers(renderer, chat, set(stop_ids))
            except UnmaskableChat:
                continue
            answers += len(rows)
            samples += merge_turns(rows)
            prompts.append(rows[0].prompt_ids.tolist())
        tokens = sum(len(s.input_ids) for s in samples)
        supervised = sum(sum(s.loss_mask) for s in samples)
        dropped = len(chats) - len(prompts)
        return cls(prompts, tokens - supervised, supervised, tokens, answers, dropped)


@dataclass(frozen=True)
class Rates:
    """Tokens a second of one process."""

    answers: float
    prefill: float
    states: float  # forward, transfer, checks and writing


def measure(config: Config, target: Target, spec: TargetSpec, demand: Demand) -> Rates:
    """A few decoding steps at the full batch and one small shard, written beside the run folder and removed."""
    by_length = sorted(demand.prompts, key=len)
    size = min(config.data.batch_size, len(by_length))
    middle = (len(by_length) - size) // 2
    batch = by_length[middle : middle + size]
    decode_batch(target, batch[:1], 2)  # warm-up

    def timed(steps: int) -> tuple[float, int]:
        started = time.monotonic()
        answers = decode_batch(target, batch, steps)
        return time.monotonic() - started, sum(len(ids) for ids, _ in answers)

    first, first_tokens = min(timed(1), timed(1))
    decode = decoding_rate(first, first_tokens, *timed(1 + STEPS))

    room = config.extract.batch_tokens
    if target.device.type == "cpu":
        room = min(room, TOKENS)
    length = max(2, min(demand.tokens // len(by_length), room))
    count = max(1, room // length)
    samples = [
        MaskedSample.of(f"timed-{i}", (p * length)[:length], [0] * (length - 1) + [1])
        for i, p in enumerate((batch * count)[:count])
    ]
    shard = ShardPlan(0, tuple(range(count)), (tuple(range(count)),))
    with tempfile.TemporaryDirectory(
        dir=existing_parent(Path(config.run_dir).absolute().parent), prefix=".dry-run-"
    ) as folder:
        started = time.monotonic()
        write_shard(
            Path(folder),
            shard,
            forward_shard(
                target, shard, samples, spec.target_layer_ids, config.extract.store_last_hidden
            ).arrived(),
            num_taps=len(spec.target_layer_ids),
            storage_dtype=STORAGE_DTYPES[config.extract.storage_dtype],
            plan_fingerprint="",
        )
        states = count * length / (time.monotonic() - started)
    return Rates(decode, sum(map(len, batch)) / max(first, 1e-3), states)


def decoding_rate(first: float, first_tokens: int, more: float, more_tokens: int) -> float:
    """Tokens a second of the steps by which a run of `more` seconds is longer than one of `first`, prompts in both.

    Other work on the machine can make the short run as slow as the long one. Then the prompts' time is counted too: a
    rate too low is an upper bound of the price, and a difference of two clocks that is noise is a rate of millions.
    """
    steps = more - first
    if steps < 0.02 * more or more_tokens <= first_tokens:
        return more_tokens / max(more, 1e-3)
    return (more_tokens - first_tokens) / steps


def price_list(
    config: Config,
    spec: TargetSpec,
    target: Target,
    renderer: Renderer,
    chats: Sequence[Chat],
    held_out: Sequence[Sequence[Chat]],
    *,
    processes: int,
) -> list[str]:
    """The lines that a person needs before paying. Leaves nothing on the disk.

    The target is measured for some seconds, unless extract.backend is vllm: then its blocks need no weights.
    """
    data, taps = config.data, len(spec.target_layer_ids)
    if data.regenerate:
        limits = data.max_new_tokens, data.max_prompt_tokens
        training = Demand.of_questions(renderer, chats, *limits)
    else:
        training = Demand.of_given(renderer, chats, target.stop_ids)
    sets = [
        Demand.of_questions(renderer, s, config.eval.max_new_tokens, data.max_prompt_tokens)
        for s in held_out
    ]
    if not training.prompts:
        raise UserError(
            f"all {training.dropped} chats of data.prompts are dropped; check data.max_prompt_tokens, "
            "data.regenerate and the files"
        )
    most = "at most " if data.regenerate else ""
    if config.extract.backend == "vllm":
        hours = [
            "hours:    unknown with extract.backend=vllm; the log of the server says how fast it is"
        ]
    else:
        rates = measure(config, target, spec, training)
        hours = _hours(training, rates, most, processes, answering=data.regenerate)

    def stored(tokens: int, dtype: str, last_hidden: bool, num_taps: int = taps) -> int:
        return tokens * bytes_per_token(num_taps, spec.hidden_size, dtype, last_hidden)

    keep, mine = config.extract.store_last_hidden, config.extract.storage_dtype
    states = stored(training.tokens, mine, keep)
    held_tokens = sum(s.tokens for s in sets)
    held = stored(held_tokens, config.eval.dtype, False)
    values = sum(t.numel() for t in head_of(target).tensors().values())
    width, eval_width = target.dtype.itemsize, STORAGE_DTYPES[config.eval.dtype].itemsize
    heads = values * (width + len(sets) * eval_width)
    window = config.extract.window_gb
    kept = states if window is None else min(states, round(window * 1e9))
    needed = kept + held + heads
    free = shutil.disk_usage(existing_parent(Path(config.run_dir))).free
    fits = "fits" if needed <= free else f"DOES NOT FIT, {amount(needed - free)} are missing"
    rolling = "" if window is None else f" at a time, {amount(states)} in all"
    lines = [
        f"tokens:   {most}{training.tokens:,}: {training.prompt_tokens:,} of {len(training.prompts):,} prompts, "
        f"{training.answer_tokens:,} of {training.answers:,} answers",
        f"held out: at most {held_tokens:,} tokens, {amount(held)} in {config.eval.dtype}; not in the hours",
        *hours,
        f"disk:     {most}{amount(needed)}: {amount(kept)} of states{rolling}, {amount(held)} held out, "
        f"{amount(heads)} of heads; {amount(free)} free: {fits}",
    ]
    if training.apart != training.tokens:
        lines.insert(
            1,
            f"turns:    joined where a template and a stopped answer allow it; if nowhere {training.apart:,} tokens, "
            f"{amount(stored(training.apart, mine, keep))} of states",
        )
    if training.dropped:
        lines.insert(1, f"dropped:  {training.dropped:,} chats (tool calls, prompts too long, ...)")
    lines.append("price:    of the training states by option; * is this config's")
    lines.append("price:    taps last_hidden " + "".join(f"{s:>15} " for s in STORAGE))
    for count in sorted({3, 5, taps}):
        for last_hidden in (False, True):
            cells = ""
            for dtype in STORAGE:
                star = "*" if (count, last_hidden, dtype) == (taps, keep, mine) else " "
                cells += f"{amount(stored(training.tokens, dtype, last_hidden, count)):>15}{star}"
            lines.append(f"price:    {count:>4} {'yes' if last_hidden else 'no':>11} {cells}")
    return lines


def _hours(
    demand: Demand, rates: Rates, most: str, processes: int, *, answering: bool
) -> list[str]:
    seconds = [0.0, demand.tokens / rates.states]
    if answering:
        seconds[0] = demand.answer_tokens / rates.answers + demand.prompt_tokens / rates.prefill
    hours = [s / 3600 / processes for s in seconds]
    return [
        f"rates:    {rates.answers:,.0f} answered and {rates.states:,.0f} extracted tokens/s in a short run, "
        "each process",
        f"hours:    {most}{sum(hours):,.2f}: {hours[0]:,.2f} for answers, {hours[1]:,.2f} for states, "
        f"with {processes} {'process' if processes == 1 else 'processes'} on this machine",
    ]
