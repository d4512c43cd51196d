"""Acceptance metrics against numbers worked out by hand, and identities that always hold."""

import math
import operator
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import UserError
from eval.metrics import (
    MIN_PROMPTS,
    MIN_ROUNDS,
    Answer,
    Row,
    bootstrap_difference,
    bootstrap_interval,
    summarize,
)
from extract.loops import repetition_rate

few = settings(max_examples=60, deadline=None)


def spent(seconds: float | None) -> dict[str, float] | None:
    return None if seconds is None else {"draft": seconds / 4, "verify": seconds * 3 / 4}


def answer(
    name: str, accepted: Sequence[int], cut: int = 0, seconds: float | None = None
) -> Answer:
    """An answer whose last round lost `cut` tokens to a stop token or the limit."""
    committed = [m + 1 for m in accepted]
    if committed:
        committed[-1] -= cut
    tokens = 1 + sum(committed)
    return Answer(
        name, tuple(committed), tuple(accepted), tokens, spent(seconds), 100 * len(accepted)
    )


def chain(answers: Sequence[Answer], **changes: Any) -> Row:
    given: dict[str, Any] = {"dataset": "math", "decoder": "dflash", "budget": None}
    given |= {"temperature": 0.0, "block_size": 4, "lossless": True}
    return summarize(answers, **(given | changes))


def enough(seconds: float | None = None, rounds: int = MIN_ROUNDS) -> list[Answer]:
    """A reliable set: 8 prompts, 200 rounds, each with two drafts accepted."""
    split = [rounds // MIN_PROMPTS] * MIN_PROMPTS
    return [answer(f"p{i}", [2] * n, seconds=seconds) for i, n in enumerate(split)]


def test_both_conventions_are_reported_by_name() -> None:
    """F3: the drafted mean is 1.75 and tau, with the bonus token, is 2.75."""
    row = chain([answer("a", [0, 1, 3, 3])]).as_dict()
    assert (row["tau"], row["tau_without_bonus"]) == (2.75, 1.75)
    assert row["histogram"] == [1, 1, 0, 2]
    assert row["accept_at_position"] == [0.75, 0.5, 0.5]
    assert (row["prompts"], row["rounds"], row["tokens"], row["accepted"]) == (1, 4, 12, 7)


def test_a_useless_drafter_has_tau_one() -> None:
    row = chain([answer("a", [0, 0, 0])])
    assert (row.tau, row.tau_without_bonus, row.ci95) == (1.0, 0.0, (1.0, 1.0))


def test_short_answers_move_the_mean_of_responses_only() -> None:
    """F14b: nine answers of 2 rounds commit 4 a round, one of 200 rounds commits 1."""
    answers = [answer(f"s{i}", [3, 3]) for i in range(9)] + [answer("long", [0] * 200)]
    row = chain(answers)
    assert row.tau_mean_of_responses == pytest.approx(3.7)
    assert row.tau == pytest.approx((9 * 2 * 4 + 200) / 218)  # 1.25
    assert row.tau_quartiles_of_responses == (4.0, 4.0)
    assert row.short_answers == 9
    assert row.ci95 is not None
    low, high = row.ci95
    assert low < (9 * 2 * 4 + 200) / 218 < high


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 9])
def test_tokens_past_the_limit_are_not_counted(limit: int) -> None:
    """F16: a drafter that is always right, under every max_new_tokens around the block of 4."""
    rounds = math.ceil((limit - 1) / 4)
    cut = 4 * rounds - (limit - 1)
    row = chain([answer("a", [3] * rounds, cut=cut)])
    assert row.tokens == limit
    assert row.cut_rounds == (cut > 0)
    assert sum((k + 1) * n for k, n in enumerate(row.histogram)) == limit - 1
    if rounds:
        assert row.tau == (limit - 1) / rounds
        assert row.tau_without_bonus == 3.0  # the drafter is not to blame for the cut
    else:  # nothing but the prefill's token: no rounds, no tau
        assert (row.tau, row.ci95, row.accept_at_position) == (None, None, ())
        assert not row.reliable


@pytest.mark.parametrize(
    "bad",
    [
        replace(answer("a", [1, 3]), tokens=8),  # more returned than counted
        replace(answer("a", [1, 3]), committed=(1, 4), tokens=6),  # a cut that is not the end
        replace(answer("a", [1, 3]), committed=(2,), tokens=3),
        replace(answer("a", [1, 3]), committed=(2, 0), tokens=3),  # a round that commits nothing
        replace(answer("a", [1, 1]), committed=(2, 3), tokens=6),  # more than was accepted
        answer("a", [1, 4]),  # more drafts than the block has
        replace(answer("a", [1, 3]), drafted=3),  # more accepted than proposed
        Answer("a", (), (), 0, None),
    ],
)
def test_impossible_counts_are_refused(bad: Answer) -> None:
    with pytest.raises(ValueError, match="impossible counts"):
        chain([bad, answer("b", [1, 2])])


def test_interval_of_two_prompts_is_their_own_ratios() -> None:
    """Of the resamples a quarter each is prompt one alone (2.0) and prompt two alone (3.0)."""
    assert bootstrap_interval([(10, 5), (30, 10)], seed=0) == (2.0, 3.0)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Prompts differ, as F14 says; drawing rounds instead of prompts would cover 54 times of 100.

    With prompts of 10 and 40 rounds, whose lengths go with their acceptance, the truth is pooled.
    """
    rng = np.random.default_rng(0)
    truth = (10 * 2.0 + 40 * 3.0) / 50
    covered = 0
    for seed in range(100):
        long = rng.integers(2, size=40)
        mean = np.where(long, 3.0, 2.0) + rng.normal(0, 0.5, size=40)
        rounds = np.where(long, 40, 10)
        committed = (
            (rounds * mean + rng.normal(0, 1, size=40) * np.sqrt(rounds)).round().astype(int)
        )
        low, high = bootstrap_interval(list(zip(committed, rounds, strict=True)), seed)
        covered += low <= truth <= high
    assert 88 <= covered <= 99


def varied(prompts: int = 12, seed: int = 0) -> list[Answer]:
    rng = random.Random(seed)
    return [
        answer(f"p{i}", [rng.randrange(1 + i % 4) for _ in range(5 + 3 * i)])
        for i in range(prompts)
    ]


def test_repeating_a_greedy_run_changes_nothing() -> None:
    """F14, F13: repeats and a padded batch measure nothing new, in whatever order they come."""
    answers = varied()
    again = [replace(a, phases=None) for a in answers] + answers[:5]
    random.Random(1).shuffle(again)
    assert chain(answers + again) == chain(answers)


def test_sampled_repeats_count_but_do_not_shrink_the_interval() -> None:
    answers = varied()
    once, thrice = chain(answers, temperature=0.7), chain(answers * 3, temperature=0.7)
    assert thrice.rounds == 3 * once.rounds
    assert (thrice.prompts, thrice.ci95, thrice.tau) == (once.prompts, once.ci95, once.tau)


def test_more_prompts_shrink_the_interval() -> None:
    few_prompts, many = chain(varied(12)), chain(varied(12) + varied(96)[12:])
    assert few_prompts.ci95 is not None
    assert many.ci95 is not None
    assert many.ci95[1] - many.ci95[0] < 0.6 * (few_prompts.ci95[1] - few_prompts.ci95[0])


def test_interval_depends_on_the_seed_alone() -> None:
    assert chain(varied(), seed=3).ci95 == chain(varied(), seed=3).ci95
    assert chain(varied(), seed=3).ci95 != chain(varied(), seed=4).ci95


def test_autoregressive_is_one_token_a_round() -> None:
    answers = [
        Answer("a", (), (), 21, spent(2.0)),
        Answer("b", (), (), 1, spent(0.0)),
        Answer("c", (), (), 5, spent(1.0)),
    ]
    row = chain(answers, decoder="autoregressive", lossless=None)
    assert (row.tau, row.tau_mean_of_responses, row.ci95) == (1.0, 1.0, (1.0, 1.0))
    assert (row.rounds, row.tokens, row.prompts, row.drafted) == (24, 27, 3, 0)
    assert row.tokens_per_second == pytest.approx(24 / 3.0)  # the prefill's tokens are not timed


def test_phases_are_of_a_round_and_the_speed_is_their_sum() -> None:
    """50 rounds of 3 tokens; one answer without times and there are none."""
    timed = {"draft": 1.0, "build": 0.5, "verify": 3.0, "commit": 0.5}
    answers = [replace(answer(f"p{i}", [2] * 25), phases=timed) for i in range(2)]
    row = chain(answers)
    assert row.phase_seconds == {"draft": 0.04, "build": 0.02, "verify": 0.12, "commit": 0.02}
    assert row.tokens_per_second == pytest.approx(3 / sum(row.phase_seconds.values()))
    assert chain([*answers, answer("c", [2])]).phase_seconds is None


def test_sums_of_each_prompt_are_kept() -> None:
    row = chain([answer("b", [0, 1], cut=1), answer("a", [3, 3, 2]), answer("c", [])])
    assert row.per_prompt == (
        {"id": "a", "committed": 11, "rounds": 3},
        {"id": "b", "committed": 2, "rounds": 2},
        {"id": "c", "committed": 0, "rounds": 0},
    )


def test_a_paired_interval_finds_what_two_intervals_hide() -> None:
    """Prompts from tau 1 to 7, and a drafter that is 0.2 better on each."""
    a = [(100 + 60 * i, 100) for i in range(11)]
    b = [(c + 20 + i % 3, n) for i, (c, n) in enumerate(a)]
    low, high = bootstrap_difference(a, b, seed=0)
    assert 0.2 <= low < high <= 0.22
    assert bootstrap_interval(a, seed=0)[1] > bootstrap_interval(b, seed=0)[0]
    assert bootstrap_difference(b, a, seed=0) == pytest.approx((-high, -low))
    with pytest.raises(ValueError, match="not paired"):
        bootstrap_difference(a, b[1:], seed=0)


def test_speed_up_is_of_pooled_speeds() -> None:
    drafted = enough(seconds=2.0)
    plain = [Answer(a.prompt_id, (), (), 1 + 10 * k, spent(4.0)) for k, a in enumerate(drafted)]
    row = chain(drafted, baseline=plain)
    speed, plain_speed = 600 / 16, 10 * sum(range(8)) / 32
    assert row.tokens_per_second == pytest.approx(speed)
    assert row.speedup == pytest.approx(speed / plain_speed)


@pytest.mark.parametrize(
    "changes",
    [
        {"lossless": False},
        {"lossless": None},
        {"baseline": None},
        {"baseline": enough(seconds=None)},
        {"answers": enough(seconds=1.0, rounds=192)},
        {"answers": [*enough(seconds=1.0)[1:], replace(enough()[0], phases=None)]},
    ],
)
def test_no_speed_up_without_proof(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"answers": enough(seconds=1.0), "baseline": enough(seconds=2.0)}
    assert chain(**given).speedup == pytest.approx(2.0)
    assert chain(**(given | changes)).speedup is None


def test_a_baseline_of_other_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in prompts"):
        chain(enough(seconds=1.0), baseline=enough(seconds=2.0)[1:])


def test_few_rounds_or_few_prompts_are_unreliable() -> None:
    assert chain(enough()).reliable
    assert not chain([answer("p0", [2] * 24), *enough()[1:]]).reliable  # 199 rounds
    assert not chain([answer(f"p{i}", [2] * 100) for i in range(7)]).reliable
    # A prompt whose answer has no round is counted and says nothing.
    seven = chain([answer(f"p{i}", [2] * 100) for i in range(7)] + [answer("p7", [])])
    assert (seven.prompts, seven.reliable) == (8, False)


def test_answers_of_fewer_than_three_rounds_are_short() -> None:
    assert chain([answer("a", [1] * n) for n in (0, 2, 3, 4)]).short_answers == 2


def test_no_answers_is_an_error_that_names_the_data_set() -> None:
    with pytest.raises(UserError, match="gsm8k"):
        chain([], dataset="gsm8k")


@pytest.mark.parametrize("decoder", ["dflash", "ddtree"])
def test_a_drafter_that_proposes_nothing_is_an_error(decoder: str) -> None:
    """F22: its figures would be those of plain decoding."""
    silent = [replace(answer(f"p{i}", [0] * 30), drafted=0) for i in range(8)]
    with pytest.raises(UserError, match=f"math: the drafter proposed no token in 240 .*{decoder}"):
        chain(silent, decoder=decoder)
    silent[3] = replace(silent[3], drafted=90)
    assert chain(silent, decoder=decoder).drafted == 90


def test_unknown_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="eagle"):
        chain(enough(), decoder="eagle")


def test_repetition_rate() -> None:
    assert repetition_rate([5] * 20) == pytest.approx(12 / 13)
    assert repetition_rate(list(range(50))) == 0.0
    assert repetition_rate([5] * 7) == 0.0  # too short to tell
    assert repetition_rate([1, 2, 1, 2, 1], n=2) == pytest.approx(0.5)  # 12 21 12 21
    assert chain(enough(), repetitive_answers=2).repetitive_answers == 2


@st.composite
def answer_lists(draw: st.DrawFn) -> list[Answer]:
    """Answers at block size 4, with at least one round between them."""
    rounds = st.lists(st.integers(0, 3), max_size=8)
    lists = draw(st.lists(rounds, min_size=1, max_size=12).filter(any))
    cuts = [draw(st.integers(0, r[-1] if r else 0)) for r in lists]
    names = [f"p{draw(st.integers(0, 9))}" for _ in lists]
    return [answer(n, r, cut) for n, r, cut in zip(names, lists, cuts, strict=True)]


@few
@given(answer_lists(), st.sampled_from([0.0, 0.7]))
def test_pooled_identities(answers: list[Answer], temperature: float) -> None:
    row = chain(answers, temperature=temperature)
    used = answers if temperature else list(dict.fromkeys(answers))
    committed = [c for a in used for c in a.committed]
    assert row.rounds == len(committed) == sum(row.histogram)
    assert row.tau == sum(committed) / len(committed)
    assert sum(committed) == row.tokens - len(used)
    assert row.tau_without_bonus is not None
    assert sum(row.accept_at_position) == pytest.approx(row.tau_without_bonus)
    assert row.tau_without_bonus + 1 >= row.tau - 1e-9  # equal where nothing was cut
    whole = [m + 1 for a in used for m in a.accepted]
    assert row.cut_rounds == sum(map(operator.ne, committed, whole))
    assert row.tau_mean_of_responses is not None
    assert row.ci95 is not None
    for tau in (row.tau, row.tau_mean_of_responses, *row.ci95):
        assert 1 <= tau <= 4
    assert row.ci95[0] <= row.ci95[1]


@few
@given(answer_lists(), st.randoms())
def test_order_does_not_matter(answers: list[Answer], rng: random.Random) -> None:
    shuffled = answers[:]
    rng.shuffle(shuffled)
    assert chain(shuffled) == chain(answers)
