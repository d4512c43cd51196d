"""The live loop under a scripted drafter, where the counts can be worked out by hand.

A real target, a real cache and a real verification. The oracle knows the target's greedy text and drafts as much of it
as the script says, past a stop token too, so every count has a closed form and a token too many would be seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.load import UserError
from configs.schema import TargetConfig
from eval.decode import Decoded, Propose, decode
from eval.live import to_answer
from eval.metrics import Row, summarize
from eval.tree import Tree, chain_tree
from extract.head import TargetHead, head_of
from extract.regenerate import decode_batch
from extract.target import Target, load_target
from tests.conftest import tiny_drafter
from train.drafter import DFlashDrafter

BLOCK = 4
ALWAYS_RIGHT = BLOCK - 1


@dataclass(frozen=True)
class World:
    target: Target
    drafter: DFlashDrafter
    head: TargetHead
    prompt: list[int]
    text: list[int]  # what the target says after it, longer than any test's limit

    def decode(self, propose: Propose, limit: int, stop: int | None = None) -> Decoded:
        """stop: a token that ends the answer, beside the tokenizer's own (which is not in the text)."""
        self.target.model.generation_config.eos_token_id = stop
        return decode(
            self.target, self.drafter, self.head, self.prompt, propose, max_new_tokens=limit
        )

    def oracle(self, script: int | Iterable[int]) -> Propose:
        """Drafts of which as many are right as the script says: a number for all rounds, or one for each."""
        rounds = repeat(script) if isinstance(script, int) else chain(script)
        at = 0

        def propose(logits: Tensor, root: int) -> Tree:
            nonlocal at
            assert root == self.text[at], "a round starts at the last token of the answer"
            assert logits.shape == (BLOCK - 1, 320)
            right = next(rounds)
            drafts = torch.tensor(self.text[at + 1 : at + BLOCK])
            drafts[right:] = (drafts[right:] + 1) % 320
            at += right + 1
            return chain_tree(drafts, root)

        return propose


@pytest.fixture(scope="module")
def world(tiny_target: Path) -> World:
    target = load_target(
        TargetConfig(path=str(tiny_target), dtype="float32", device="cpu"), dtype="float32"
    )
    drafter = tiny_drafter(target, BLOCK)
    target.model.generation_config.eos_token_id = None
    # A random target soon repeats itself; take the prompt after which it does so least.
    prompts = torch.randint(8, 300, (64, 5), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [text for text, _ in decode_batch(target, prompts, 40)]
    best = max(range(64), key=lambda i: (len(texts[i]) == 40, len(set(texts[i][:14]))))
    drafter = drafter.eval().requires_grad_(False)
    return World(target, drafter, head_of(target), prompts[best], texts[best])


def rounds_of(tokens: int, right: int) -> tuple[list[int], list[int]]:
    """(committed, accepted) of an answer of so many tokens, when each round has `right` drafts right."""
    rounds = math.ceil((tokens - 1) / (right + 1))
    last = tokens - 1 - (right + 1) * (rounds - 1)
    full = max(rounds - 1, 0)
    return [right + 1] * full + [last] * (rounds > 0), [right] * full + [min(right, last)] * (
        rounds > 0
    )


def row_of(decoded: Decoded) -> Row:
    return summarize(
        [to_answer("p", decoded)],
        dataset="oracle",
        decoder="dflash",
        budget=None,
        temperature=0.0,
        block_size=BLOCK,
        lossless=True,
        baseline=[to_answer("p", decoded)],
    )


@pytest.mark.parametrize("right", range(BLOCK))
def test_a_limit_anywhere_in_a_block(world: World, right: int) -> None:
    for limit in range(1, 15):
        got = world.decode(world.oracle(right), limit)
        assert got.tokens == world.text[:limit]
        assert (got.committed, got.accepted) == rounds_of(limit, right), limit
        assert got.drafted == (BLOCK - 1) * len(got.committed)


@pytest.mark.parametrize("right", range(BLOCK))
def test_a_stop_token_anywhere_in_a_block(world: World, right: int) -> None:
    """Among the drafts, as the bonus token, as the very first token: the answer ends with it."""
    places = [i for i in range(14) if world.text[i] not in world.text[:i]]
    assert len(places) >= 9, "the text repeats itself, and the test has too little to see"
    for place in places:
        got = world.decode(world.oracle(right), 36, stop=world.text[place])
        assert got.tokens == world.text[: place + 1]
        assert (got.committed, got.accepted) == rounds_of(place + 1, right), place
        assert sum(got.committed) == len(got.tokens) - 1


def test_an_immediate_stop_has_no_round_and_no_tau(world: World) -> None:
    got = world.decode(world.oracle(ALWAYS_RIGHT), 36, stop=world.text[0])
    assert (got.tokens, got.committed, got.accepted, got.drafted) == ([world.text[0]], [], [], 0)
    row = row_of(got)
    assert (row.tau, row.rounds, row.tokens, row.reliable) == (None, 0, 1, False)


def test_an_answer_of_six_tokens(world: World) -> None:
    """One whole block and one token: tau 2.5, and nothing else can be said of it."""
    got = world.decode(world.oracle(ALWAYS_RIGHT), 6)
    assert (got.committed, got.accepted) == ([4, 1], [3, 1])
    row = row_of(got)
    assert (row.tau, row.tau_without_bonus, row.tokens, row.cut_rounds) == (2.5, 2.0, 6, 1)
    assert row.histogram == (1, 0, 0, 1)
    assert row.accept_at_position == (1.0, 0.5, 0.5)
    assert (row.reliable, row.speedup, row.short_answers) == (False, None, 1)


def test_rounds_of_every_length_in_one_answer(world: World) -> None:
    script = [2, 0, 3, 1, 1, 3, 0]
    got = world.decode(world.oracle(script), 1 + sum(script) + len(script))
    assert got.accepted == script
    assert got.committed == [m + 1 for m in script]
    assert got.tokens == world.text[: len(got.tokens)]
    assert row_of(got).histogram == (2, 2, 1, 2)


def test_phases_are_timed_and_arrive_in_the_row(world: World) -> None:
    got = world.decode(world.oracle(1), 20)
    assert list(got.seconds) == ["draft", "build", "verify", "commit"]
    assert all(seconds > 0 for seconds in got.seconds.values())
    phases = row_of(got).phase_seconds
    assert phases is not None
    assert sum(phases.values()) * 10 == pytest.approx(sum(got.seconds.values()))


def test_a_right_branch_beside_a_wrong_one_is_found(world: World) -> None:
    """A tree whose first branch is wrong: all four tokens come from the second."""
    at = 0

    def propose(logits: Tensor, root: int) -> Tree:
        nonlocal at
        a, b, c = world.text[at + 1 : at + 4]
        at += 4
        wrong = (a + 1) % 320
        tokens = torch.tensor([root, wrong, a, b, b, c])
        parents = torch.tensor([-1, 0, 0, 1, 2, 4])
        return Tree(tokens, parents, torch.tensor([0, 1, 1, 2, 2, 3]), torch.zeros(6).double())

    got = world.decode(propose, 17)
    assert got.tokens == world.text[:17]
    assert got.committed == [4] * 4
    assert got.drafted == 5 * 4


def test_a_drafter_that_proposes_nothing_is_an_error(world: World) -> None:
    """The text is right all the same, and the figures would be plain decoding's."""
    got = world.decode(lambda logits, root: chain_tree(torch.tensor([]), root), 12)
    assert got.tokens == world.text[:12]
    assert (got.committed, got.drafted) == ([1] * 11, 0)
    with pytest.raises(UserError, match="oracle: the drafter proposed no token in 11 rounds"):
        row_of(got)
