"""From decoded answers to one row of results.json: the acceptance length tau and how sure it is.

A round is one forward of the target that verifies a draft. It accepts some drafted tokens and adds
one of its own, the bonus token. tau counts both, as DFlash, DDTree, vLLM and SGLang do, so it is 1
for a useless drafter and block_size for a perfect one. `tau_without_bonus` is the other convention
in use; published numbers of the two differ by one.

tau pools tokens and rounds over the answers before it divides. A mean over answers would give an
answer of three tokens the weight of one of five hundred; it is reported as well, by its own name.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.load import UserError

Json = dict[str, Any]

DECODERS = ("autoregressive", "dflash", "ddtree")
PHASES = ("draft", "build", "verify", "commit")  # of a round of our own decoders, in this order
MODES = {
    "replay": "acceptance worked out from the target's stored greedy answers; nothing was timed",
    "live": "the target decoded these prompts with each decoder",
    "served": "a running engine decoded these prompts; acceptance from its own counters",
}

# Below either, `reliable` is False and no speed-up is given. Acceptance differs by half its mean
# from prompt to prompt, so fewer than 8 prompts say nothing about a data set; with 200 rounds of
# a standard deviation of 2 tokens, rounds alone blur tau by 0.3 (95 %).
MIN_PROMPTS = 8
MIN_ROUNDS = 200

# In an answer this short, the first round and the cut-off last one are most of what is measured.
SHORT_ROUNDS = 3

RESAMPLES = 2000


@dataclass(frozen=True)
class Answer:
    """One prompt, answered by one decoder. The first token is the prefill's, of no round."""

    prompt_id: str
    committed: tuple[int, ...]  # tokens each round added, with bonus; the last may be cut short
    accepted: tuple[int, ...]  # drafted tokens each round accepted, before that cut
    tokens: int  # of the answer, the first one included
    phases: Mapping[str, float] | None = field(hash=False)  # seconds of each, without the prefill
    drafted: int = 0  # tokens that the drafter proposed

    @property
    def seconds(self) -> float | None:
        """Of decoding, without the prefill."""
        return None if self.phases is None else math.fsum(self.phases.values())


@dataclass(frozen=True)
class Row:
    """One data set under one decoder: a row of results.json. No rounds, no tau: then it is None."""

    dataset: str
    decoder: str
    budget: int | None
    temperature: float
    tau: float | None
    tau_mean_of_responses: float | None
    ci95: tuple[float, float] | None  # of tau, over prompts
    accept_at_position: tuple[float, ...]  # [k]: share of rounds that accepted more than k drafts
    histogram: tuple[int, ...]  # [k]: rounds that committed k + 1 tokens
    prompts: int
    rounds: int
    tokens: int
    tokens_per_second: float | None
    speedup: float | None
    lossless: bool | None  # None: not checked
    reliable: bool
    # A row from elsewhere may lack what follows.
    tau_quartiles_of_responses: tuple[float, float] | None = None
    tau_without_bonus: float | None = None  # mean of Answer.accepted, so without the cut either
    drafted: int | None = None
    accepted: int | None = None
    cut_rounds: int | None = None  # rounds that a stop token or the length limit cut short
    short_answers: int | None = None  # answers of fewer than SHORT_ROUNDS rounds
    repetitive_answers: int | None = None
    phase_seconds: dict[str, float] | None = None  # of a round, by phase
    per_prompt: tuple[Json, ...] | None = None  # {id, committed, rounds}: what a paired test needs

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON has it: lists for tuples."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


def summarize(
    answers: Sequence[Answer],
    *,
    dataset: str,
    decoder: str,
    budget: int | None,
    temperature: float,
    block_size: int,
    lossless: bool | None,
    baseline: Sequence[Answer] | None = None,
    repetitive_answers: int | None = None,
    seed: int = 0,
) -> Row:
    """Sum up one data set's answers. Neither their order nor greedy repeats change the row.

    baseline: the autoregressive answers to the same prompts, for the speed-up.
    repetitive_answers: how many answers the caller found degenerate, see extract.loops.
    """
    if decoder not in DECODERS:
        raise ValueError(f"decoder must be one of {DECODERS}, not {decoder!r}")
    if not answers:
        raise UserError(f"data set {dataset}: {decoder} has no answers; no prompt was usable")
    answers = _distinct(answers, temperature)
    if decoder == "autoregressive":
        answers = [_plain(answer) for answer in answers]
    for answer in answers:
        _check(answer, block_size)

    committed = np.array([c for a in answers for c in a.committed], dtype=np.int64)
    accepted = np.array([m for a in answers for m in a.accepted], dtype=np.int64)
    rounds, drafted = len(committed), sum(a.drafted for a in answers)
    if decoder != "autoregressive" and rounds > 0 and drafted == 0:
        raise UserError(
            f"data set {dataset}: the drafter proposed no token in {rounds} rounds of {decoder}, "
            "so this would measure plain decoding; check the drafter's checkpoint and dtype"
        )

    # Answers to one prompt are not independent, so the prompt is what the bootstrap draws.
    per_prompt: dict[str, list[int]] = {}
    for answer in sorted(answers, key=lambda a: a.prompt_id):
        sums = per_prompt.setdefault(answer.prompt_id, [0, 0])
        sums[0] += sum(answer.committed)
        sums[1] += len(answer.committed)
    measured = [(sums[0], sums[1]) for sums in per_prompt.values() if sums[1] > 0]
    means = [sum(a.committed) / len(a.committed) for a in answers if a.committed]

    reliable = rounds >= MIN_ROUNDS and len(measured) >= MIN_PROMPTS
    speed, speedup = _speed(answers), None
    if lossless and reliable and baseline is not None:
        baseline = _distinct(baseline, temperature)
        if {a.prompt_id for a in baseline} != per_prompt.keys():
            raise ValueError(f"data set {dataset}: {decoder} and its baseline differ in prompts")
        plain_speed = _speed(baseline)
        speedup = speed / plain_speed if speed and plain_speed else None

    return Row(
        dataset=dataset,
        decoder=decoder,
        budget=budget,
        temperature=temperature,
        tau=int(committed.sum()) / rounds if rounds else None,
        tau_mean_of_responses=math.fsum(means) / len(means) if means else None,
        ci95=bootstrap_interval(measured, seed) if measured else None,
        accept_at_position=tuple(
            int((accepted > k).sum()) / rounds for k in range(block_size - 1) if rounds
        ),
        histogram=tuple(np.bincount(committed, minlength=block_size + 1)[1:].tolist()),
        prompts=len(per_prompt),
        rounds=rounds,
        tokens=sum(a.tokens for a in answers),
        tokens_per_second=speed,
        speedup=speedup,
        lossless=lossless,
        reliable=reliable,
        tau_quartiles_of_responses=_percentiles(means, 25, 75) if means else None,
        tau_without_bonus=int(accepted.sum()) / rounds if rounds else None,
        drafted=drafted,
        accepted=int(accepted.sum()),
        cut_rounds=int((committed <= accepted).sum()),
        short_answers=sum(len(a.committed) < SHORT_ROUNDS for a in answers),
        repetitive_answers=repetitive_answers,
        phase_seconds=_phase_seconds(answers, rounds),
        per_prompt=tuple(
            {"id": name, "committed": sums[0], "rounds": sums[1]}
            for name, sums in per_prompt.items()
        ),
    )


def bootstrap_interval(sums: Sequence[tuple[int, int]], seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap of sum(committed) / sum(rounds), drawing prompts.

    sums: (committed, rounds) of each prompt, rounds above 0. Rounds are never drawn by themselves:
    those of one prompt are alike, and the interval would come out several times too narrow.
    """
    return _percentiles(_resampled(sums, seed), 2.5, 97.5)


def bootstrap_difference(
    a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]], seed: int
) -> tuple[float, float]:
    """The same for tau of b less tau of a, whose entry i is the same prompt.

    Both see the same draws. What makes a prompt easy for one drafter makes it easy for another, and
    so cancels in the difference; two intervals laid side by side would hide most differences.
    """
    if len(a) != len(b):
        raise ValueError(f"not paired: {len(a)} and {len(b)} prompts")
    return _percentiles(_resampled(b, seed) - _resampled(a, seed), 2.5, 97.5)


def _resampled(sums: Sequence[tuple[int, int]], seed: int) -> NDArray[np.float64]:
    """tau of each bootstrap draw of prompts, [RESAMPLES]; the draws follow from count and seed."""
    committed, rounds = np.array(sums, dtype=np.int64).T
    draws = np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))
    ratios: NDArray[np.float64] = committed[draws].sum(axis=1) / rounds[draws].sum(axis=1)
    return ratios


def _percentiles(
    values: Sequence[float] | NDArray[np.float64], low: float, high: float
) -> tuple[float, float]:
    at_low, at_high = np.percentile(values, [low, high])
    return float(at_low), float(at_high)


def _distinct(answers: Sequence[Answer], temperature: float) -> list[Answer]:
    """Drop greedy repeats of an answer (a padded batch, a run twice): they measure nothing new."""
    if temperature > 0:
        return list(answers)
    first: dict[tuple[Any, ...], Answer] = {}
    for answer in answers:
        first.setdefault(
            (answer.prompt_id, answer.committed, answer.accepted, answer.tokens), answer
        )
    return list(first.values())


def _plain(answer: Answer) -> Answer:
    """Plain decoding as rounds: every forward after the prefill commits one token."""
    rounds = answer.tokens - 1
    return dataclasses.replace(answer, committed=(1,) * rounds, accepted=(0,) * rounds, drafted=0)


def _check(answer: Answer, block_size: int) -> None:
    """Refuse counts that no decoding can have: they come from a bug in a decode loop."""
    whole = tuple(m + 1 for m in answer.accepted)  # what each round commits unless it is cut
    if not (
        len(whole) == len(answer.committed)
        and all(1 <= w <= block_size for w in whole)
        and answer.committed[:-1] == whole[:-1]
        and all(1 <= c <= w for c, w in zip(answer.committed[-1:], whole[-1:], strict=True))
        and answer.tokens == 1 + sum(answer.committed)
        and (answer.drafted == 0 or answer.drafted >= sum(answer.accepted))
    ):
        raise ValueError(f"impossible counts at block size {block_size}: {answer}")


def _speed(answers: Sequence[Answer]) -> float | None:
    """Pooled tokens per second; the first token is not counted, as the prefill's time is not."""
    times = [a.seconds for a in answers if a.seconds is not None]
    total = math.fsum(times)
    if len(times) < len(answers) or total <= 0:
        return None
    return sum(a.tokens - 1 for a in answers) / total


def _phase_seconds(answers: Sequence[Answer], rounds: int) -> dict[str, float] | None:
    """Seconds of a round by phase, pooled as the speed is."""
    timed = [a.phases for a in answers if a.phases is not None]
    if len(timed) < len(answers) or rounds == 0:
        return None
    names = dict.fromkeys(name for phases in timed for name in phases)
    return {name: math.fsum(p.get(name, 0.0) for p in timed) / rounds for name in names}
