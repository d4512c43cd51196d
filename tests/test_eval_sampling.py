"""Sampled answers are transformers' own: token for token with the same draws, and in distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import eval.decode
from configs.schema import Config, EvalConfig, TargetConfig
from eval.decode import Drafting, decode, propose_chain, propose_tree, walk
from eval.done import SAMPLING, settings_of
from eval.main import notes_on
from eval.tree import Tree, build_tree
from eval.verify import Verifier
from extract.choose import Sampler
from extract.head import TargetHead, head_of
from extract.regenerate import decode_batch
from extract.target import Target, load_target
from tests.conftest import make_target
from train.drafter import DFlashDrafter, DraftShape, drafter_config

VOCABULARY = 12  # so small that a random drafter is often right; id 2 ends an answer
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "gdn": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "top_p": 0.85},
    {"temperature": 1.5, "top_k": 5, "repetition_penalty": 1.3},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8},
]
PROPOSALS = {"chain": propose_chain, "tree": propose_tree(40)}
PROMPTS = [[5, 3, 9], [7], [1, 1, 4, 10, 6, 8, 3], [0, 11]]


def cases() -> pytest.MarkDecorator:
    """Every setting on the dense target; on the slower recurrent one all of them at once."""
    pairs = [pytest.param("dense", s, id=f"dense-{','.join(s)}") for s in SETTINGS]
    gdn = pytest.param("gdn", SETTINGS[-1], id="gdn")
    return pytest.mark.parametrize(("target", "settings"), [*pairs, gdn], indirect=["target"])


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    family, settings = FAMILIES[request.param]
    folder = make_target(
        tmp_path_factory.mktemp(request.param),
        family=family,
        layers=3,
        vocab_size=VOCABULARY,
        initializer_range=0.12,
        **settings,
    )
    return load_target(TargetConfig(path=str(folder), dtype="float32", device="cpu"))


@pytest.fixture
def drafter(target: Target) -> DFlashDrafter:
    config = drafter_config(target.config, num_hidden_layers=1, initializer_range=0.3)
    drafter = DFlashDrafter(config, DraftShape(4, VOCABULARY - 1, (0, 2), 3))
    drafter.reset_parameters(1)
    drafter.norm.weight.data *= 0.2  # unsure, so that its trees are broad
    return drafter.eval().requires_grad_(False)


def generate(target: Target, texts: list[list[int]], settings: dict[str, Any], **more: Any) -> Any:
    """transformers' own decoding of texts of one length, with nothing on that `settings` does not name."""
    ids = torch.tensor(texts)
    sampled = "temperature" in settings
    off = {"top_k": 0, "top_p": 1.0} if sampled else {}
    return target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=sampled,
        return_dict_in_generate=True,
        output_scores=True,
        **(off | settings | more),
    )


def distributions(target: Target, texts: list[list[int]], settings: dict[str, Any]) -> Tensor:
    """What `generate` draws the next token of each text from, [n, V]."""
    return generate(target, texts, settings, max_new_tokens=1).scores[0].softmax(-1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def generated(target: Target, seed: int, settings: dict[str, Any], limit: int) -> list[int]:
    """The answer to one of the prompts, which is also the seed."""
    prompt = PROMPTS[seed]
    torch.manual_seed(seed)
    out = generate(target, [prompt], settings, max_new_tokens=limit).sequences[0]
    return out[len(prompt) :].tolist()


@cases()
def test_plain_answers_are_those_of_generate_in_any_company(target, settings):
    """Rows of one batch: each has its own prompt, its own length and its own draws."""
    generators = [seeded(i) for i in range(len(PROMPTS))]
    answers = decode_batch(target, PROMPTS, 16, sampler=Sampler(**settings), generators=generators)
    expected = [generated(target, i, settings, 16) for i in range(len(PROMPTS))]
    assert [ids for ids, _ in answers] == expected
    assert len({tuple(x) for x in expected}) == len(PROMPTS)


def informed(propose: eval.decode.Propose, answer: list[int]) -> eval.decode.Propose:
    """Drafts that are often right: what follows the root elsewhere in the answer is made likelier."""

    def inner(logits: Tensor, root: int) -> Tree:
        logits = logits.clone()
        for at in (i for i, token in enumerate(answer) if token == root):
            for slot, token in enumerate(answer[at + 1 : at + 1 + len(logits)]):
                logits[slot, token] += 2
        return propose(logits, root)

    return inner


@cases()
def test_live_answers_are_those_of_generate(target, drafter, settings):
    """Every committed token is one draw with its own prefix, so equal draws give equal texts, whatever was drafted."""
    accepted: dict[str, Counter[int]] = {key: Counter() for key in PROPOSALS}
    for seed, prompt in enumerate(PROMPTS):
        expected = generated(target, seed, settings, 24)
        for key, propose in PROPOSALS.items():
            got = decode(
                target,
                drafter,
                head_of(target),
                prompt,
                informed(propose, expected),
                max_new_tokens=24,
                sampler=Sampler(**settings),
                generator=seeded(seed),
            )
            assert got.tokens == expected, (key, seed)
            accepted[key].update(got.accepted)
    for seen in accepted.values():
        assert len(seen) >= 2 and max(seen) >= 2, (
            f"accepted {accepted}: the test has seen too little"
        )


@cases()
def test_each_node_is_drawn_from_what_generate_would_draw_from(target, settings, monkeypatch):
    prompt, sampler = PROMPTS[2], Sampler(**settings)
    tree = build_tree(torch.randn(3, VOCABULARY, generator=seeded(4)), 6, 12)
    verifier = Verifier(target, (0, 2))
    verifier.prefill(prompt)
    logits, _ = verifier.verify(tree)
    led: list[int] = []
    seen: list[Tensor] = []

    def follow(self: Sampler, logits: Tensor, prefixes: Tensor, _generators: Any) -> Tensor:
        """Go where we are led, and note what the draw would have been from."""
        seen.append(self.scores(logits, prefixes).softmax(-1)[0])
        return torch.tensor([led[len(seen) - 1]])

    monkeypatch.setattr(Sampler, "choose", follow)
    for node in range(len(tree.tokens)):
        path = [i for i in range(node + 1) if tree.ancestor_mask()[node, i]]
        tokens = tree.tokens[path].tolist()
        seen.clear()
        led[:] = [*tokens[1:], -1]  # no token is -1, so the walk ends at the node
        assert walk(tree, logits, sampler, [*prompt, 6], None) == (path, led)
        (expected,) = distributions(target, [prompt + tokens], settings)
        torch.testing.assert_close(seen[-1], expected, rtol=1e-4, atol=1e-6)


class Memory:
    """The target and the drafter of a decode, each forward made once: 20,000 short answers share few texts.

    Stands in for both `Verifier` and `Drafting`. A node's logits are those of a plain forward of its prefix.
    """

    def __init__(self, target: Target, drafter: DFlashDrafter) -> None:
        self.target, self.drafter, self.head = target, drafter, head_of(target)
        self.text: tuple[int, ...] = ()
        self.tree: Tree | None = None
        self.known: dict[Any, Any] = {}

    def start(self, *_: Any) -> Memory:
        self.text = ()
        return self

    def drafting(self, *_: Any) -> Memory:
        return self

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if (*self.text, key) not in self.known:
            self.known[*self.text, key] = make()
        return self.known[*self.text, key]

    def next_logits(self, texts: list[list[int]]) -> Tensor:
        return torch.stack(
            [self.target.logits(self.taps_and_last(text)[1][0, -1]) for text in texts]
        )

    def taps_and_last(self, text: list[int]) -> tuple[Tensor, Tensor]:
        return self.target.forward_taps(
            torch.tensor([text]), self.drafter.shape.target_layer_ids, use_cache=False
        )

    def prefill(self, prompt: list[int]) -> tuple[Tensor, Tensor]:
        self.text = tuple(prompt)
        return self.once("prefill", lambda: self.next_logits([prompt]))[0], torch.empty(0, 0)

    def draft(self, root: int) -> Tensor:
        def make() -> Tensor:
            drafting = Drafting(self.drafter, self.head)
            drafting.append(self.taps_and_last(list(self.text))[0][0])
            return drafting.draft(root)

        return self.once(("draft", root), make)

    def proposing(self, propose: eval.decode.Propose) -> eval.decode.Propose:
        return lambda logits, root: self.once(("tree", root), lambda: propose(logits, root))

    def verify(self, tree: Tree) -> tuple[Tensor, Tensor]:
        def make() -> Tensor:
            paths = [tree.tokens[mask].tolist() for mask in tree.ancestor_mask()]
            return self.next_logits([[*self.text, *path] for path in paths])

        self.tree = tree
        return self.once(("nodes", int(tree.tokens[0])), make), torch.empty(len(tree.tokens), 0)

    def append(self, features: Tensor) -> None:
        """The features follow from the text."""

    def commit(self, path: list[int]) -> None:
        assert self.tree is not None
        self.text += tuple(self.tree.tokens[path].tolist())


def exact(
    target: Target, prompt: list[int], settings: dict[str, Any], length: int
) -> dict[tuple[int, ...], float]:
    """Every answer of at most `length` tokens that plain sampling can give, with its probability."""
    ended: dict[tuple[int, ...], float] = {}
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        rows = distributions(target, [prompt + list(a) for a in growing], settings).double()
        grown = {
            (*answer, token): p * q
            for (answer, p), row in zip(growing.items(), rows.tolist(), strict=True)
            for token, q in enumerate(row)
            if q > 0
        }
        ended |= {a: p for a, p in grown.items() if a[-1] in target.stop_ids}
        growing = {a: p for a, p in grown.items() if a[-1] not in target.stop_ids}
    return ended | growing


def surprise(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The chi-square statistic in standard deviations (Wilson-Hilferty); rare answers are one cell together."""
    assert counts.keys() <= expected.keys(), "an answer that plain sampling never gives"
    draws = counts.total()
    common = {a: p for a, p in expected.items() if p * draws >= 5}
    cells = [(counts[a], p * draws) for a, p in common.items()]
    rest = draws - sum(n for n, _ in cells), draws - math.fsum(e for _, e in cells)
    cells += [rest] if rest[1] >= 5 else []
    freedom = len(cells) - 1
    assert freedom >= 20, "the test sees too little"
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


UNLIKELY = 3.719  # standard deviations: significance 1e-4, one-sided


def answers(
    target: Target,
    drafter: DFlashDrafter,
    head: TargetHead,
    propose: eval.decode.Propose,
    settings: dict[str, Any],
    draws: int,
) -> Counter[tuple[int, ...]]:
    sampler, generator = Sampler(**settings), seeded(11)
    return Counter(
        tuple(
            decode(
                target,
                drafter,
                head,
                PROMPTS[0],
                propose,
                max_new_tokens=3,
                sampler=sampler,
                generator=generator,
            ).tokens
        )
        for _ in range(draws)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "settings"),
    [("dense", SETTINGS[-1]), ("gdn", SETTINGS[2])],
    ids=["dense", "gdn"],
    indirect=["target"],
)
@pytest.mark.parametrize("decoder", PROPOSALS)
def test_20000_answers_are_distributed_as_plain_sampling(
    target, drafter, decoder, settings, monkeypatch
):
    memory = Memory(target, drafter)
    monkeypatch.setattr(eval.decode, "Verifier", memory.start)
    monkeypatch.setattr(eval.decode, "Drafting", memory.drafting)
    propose = memory.proposing(PROPOSALS[decoder])
    counts = answers(target, drafter, memory.head, propose, settings, 20_000)
    assert surprise(counts, exact(target, PROMPTS[0], settings, 3)) < UNLIKELY


@pytest.mark.slow
@pytest.mark.parametrize("decoder", PROPOSALS)
@pytest.mark.parametrize("target", ["dense", "gdn"], indirect=True)
def test_1000_verified_answers_are_distributed_as_plain_sampling(target, drafter, decoder):
    settings = SETTINGS[2]
    counts = answers(target, drafter, head_of(target), PROPOSALS[decoder], settings, 1000)
    assert surprise(counts, exact(target, PROMPTS[0], settings, 3)) < UNLIKELY


def test_plain_greedy_takes_the_lowest_of_equal_logits():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [1.0, 0.0, 0.0, 1.0]], dtype=torch.bfloat16)
    prefixes = torch.zeros(2, 1, dtype=torch.int64)
    assert Sampler().choose(logits, prefixes).tolist() == [1, 0]
    # token 1 has been said, so token 3 is now the better one
    assert Sampler(repetition_penalty=1.1).choose(logits, prefixes + 1).tolist() == [3, 0]


def test_every_setting_of_the_config_reaches_the_sampler_and_the_report():
    options = EvalConfig(temperature=0.7, top_k=8, top_p=0.9, min_p=0.05, repetition_penalty=1.2)
    assert Sampler.of(options) == Sampler(0.7, 8, 0.9, 0.05, 1.2)
    named = "eval.temperature=0.7, eval.top_k=8, eval.top_p=0.9, eval.min_p=0.05, eval.repetition_penalty=1.2"
    for mode, words in (("live", "picks its tokens with"), ("replay", "plain greedy decoding")):
        (note,) = notes_on(options, mode)
        assert named in note and words in note
        assert notes_on(EvalConfig(), mode) == []
        assert "keep_chain" in notes_on(EvalConfig(keep_chain=True), mode)[0]


def test_results_made_with_other_settings_are_not_taken_for_these():
    """Replay does not depend on what only live decoding reads."""
    assert {field.name for field in fields(Sampler)} == set(SAMPLING)
    config = Config.model_validate(
        {"run_dir": "r", "target": {"path": "t"}, "data": {"prompts": ["p"]}}, strict=False
    )

    def made(mode: str, options: EvalConfig) -> str:
        return settings_of(config.model_copy(update={"eval": options}), mode, {})

    usual = EvalConfig()
    for other in (
        EvalConfig(budgets=(16,)),
        EvalConfig(keep_chain=True),
        EvalConfig(max_new_tokens=9),
    ):
        assert made("replay", other) != made("replay", usual)
    for other in (EvalConfig(temperature=0.5), EvalConfig(live_prompts=3)):
        assert made("replay", other) == made("replay", usual)
        assert made("live", other) != made("live", usual)
    seeded = config.model_copy(update={"seed": 7})
    assert settings_of(seeded, "live", {}) != settings_of(config, "live", {})
    assert settings_of(seeded, "replay", {}) == settings_of(config, "replay", {})
    served = [settings_of(config, "served", {}, f"http://{host}") for host in ("a", "b")]
    assert served[0] != served[1]
