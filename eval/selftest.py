"""Is decoding lossless on this target? Asked of the target itself, before any number is believed.

    python eval/main.py --config C --self-test

Answered by plain forwards that know nothing of trees, masks or caches:

- plain: do one forward and decoding token by token agree, and are the logits those that drafters will be trained on?
- nodes: are a node's logits those of a plain forward over its root path? And beyond the sliding window (long)?
- commits: after rounds of drafting and rejecting, are the next logits those of a fresh forward over what was kept?
- text: is greedy decoding, with drafts that are right, wrong and nearly right, plain greedy decoding?

How far the two plain ways lie apart on this very target is the yardstick for logits. Near-ties flip, so a differing
choice is judged by how much the plain forward prefers its own: in bfloat16 rounding moves that margin by 0 to 0.25,
foreign tokens in a state by 0.6 to 2.4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import Config
from eval.tree import Tree
from eval.verify import CHUNK, Verifier, layer_kinds
from extract.cache import cache_argument, new_cache
from extract.prompts import Renderer
from extract.regenerate import decode_batch
from extract.target import Target

TIMES = 5  # logits may differ by this many times the target's own rounding
# ... which counts as this share of the largest logit at least, and must not be more than that
ROUNDING = {torch.bfloat16: (0.04, 0.2), torch.float32: (5e-5, 1e-3)}


def near_tie(dtype: torch.dtype) -> float:
    """By how many logits a choice may differ from plain decoding's before it is not rounding any more."""
    return 0.5 if dtype == torch.bfloat16 else 0.005


@dataclass
class Check:
    """One question and what was found."""

    name: str
    limit: float  # of `difference`
    tie: float  # limit of `margin`
    compared: int = 0  # next-token distributions
    difference: float = 0.0  # largest, as a share of the largest logit
    flips: int = 0  # choices that differ
    margin: float = 0.0  # largest preference of the plain forward for its own choice, in logits

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.margin <= self.tie and self.difference <= self.limit

    def add(self, ours: Tensor, plain: Tensor) -> None:
        """Compare logits [..., V]."""
        ours, plain = ours.float().flatten(0, -2), plain.float().flatten(0, -2)
        worst = float((ours - plain).abs().max() / plain.abs().max())
        self.difference = max(self.difference, worst) if worst == worst else float("inf")
        self.compared += len(ours)
        lost = plain.amax(-1) - plain.gather(-1, ours.argmax(-1, keepdim=True))[:, 0]
        self.flips += int((lost > 0).sum())
        self.margin = max(self.margin, float(lost.max()))

    def __str__(self) -> str:
        choices = f"{self.flips} choices differ"
        if self.flips:
            choices += f" by up to {self.margin:.2g} (limit {self.tie:g})"
        return (
            f"{'ok  ' if self.passed else 'FAIL'} {self.name}: {self.compared} distributions, {choices}, "
            f"logits by {self.difference:.1e} (limit {self.limit:.0e})"
        )


@torch.inference_mode()
def self_test(
    target: Target,
    prompt: Sequence[int],
    *,
    nodes: int = 64,
    depth: int = 15,
    rounds: int = 20,
    new_tokens: int = 48,
    seed: int = 0,
    verifier: Callable[[Target], Verifier] | None = None,
) -> list[Check]:
    """Ask all of them. `verifier` makes what is tested (default: ours)."""
    make = verifier or (lambda t: Verifier(t, (0,)))
    random, words = torch.Generator().manual_seed(seed), _words(target)
    ((answer, _),) = decode_batch(target, [list(prompt)], new_tokens)
    (plain,) = plain_logits(target, [[*prompt, *answer]], [len(answer) + 1])
    tie = near_tie(target.dtype)
    least, most = ROUNDING.get(target.dtype, (0.0, 1e-3))
    rounding = Check("plain", most, tie)
    rounding.add(stepwise_logits(target, prompt, answer), plain)
    limit = TIMES * max(rounding.difference, least)
    checks = [Check(name, limit, tie) for name in ("nodes", "long", "commits", "text")]
    _nodes(checks[0], make(target), target, prompt, random, words, nodes, depth)
    _nodes(checks[1], make(target), target, long_prompt(target, prompt), random, words, 6, depth)
    _commits(checks[2], make(target), target, prompt, random, words, rounds, depth)
    _text(checks[3], make, target, plain, prompt, answer, depth)
    return [rounding, *checks]


def short_test(target: Target, config: Config) -> list[Check]:
    """What live decoding starts with."""
    prompt = test_prompt(target, config)
    return self_test(target, prompt, nodes=16, rounds=5, depth=6, new_tokens=12)


def _nodes(
    check: Check,
    verifier: Verifier,
    target: Target,
    prompt: Sequence[int],
    random: torch.Generator,
    words: Tensor,
    nodes: int,
    depth: int,
) -> None:
    verifier.prefill(prompt)
    tree = random_tree(random, nodes, depth, words)
    logits, _ = verifier.verify(tree)
    paths = leaf_paths(tree)
    for part in (paths[i : i + 16] for i in range(0, len(paths), 16)):
        texts = [[*prompt, *tree.tokens[path].tolist()] for path in part]
        plain = plain_logits(target, texts, [len(path) for path in part])
        for path, theirs in zip(part, plain, strict=True):
            check.add(logits[path], theirs)


def _commits(
    check: Check,
    verifier: Verifier,
    target: Target,
    prompt: Sequence[int],
    random: torch.Generator,
    words: Tensor,
    rounds: int,
    depth: int,
) -> None:
    verifier.prefill(prompt)
    kept = list(prompt)
    for i in range(rounds):
        tree = random_tree(random, 12, depth, words)
        logits, _ = verifier.verify(tree)
        paths = leaf_paths(tree)
        path = paths[int(torch.randint(len(paths), (), generator=random))]
        path = path[: 1 + int(torch.randint(len(path), (), generator=random))]
        kept += tree.tokens[path].tolist()
        if i % 5 == 4 or i == rounds - 1:  # a fresh forward costs all of the past
            check.add(logits[path], plain_logits(target, [kept], [len(path)])[0])
        verifier.commit(path)


def _text(
    check: Check,
    make: Callable[[Target], Verifier],
    target: Target,
    plain: Tensor,
    prompt: Sequence[int],
    answer: Sequence[int],
    depth: int,
) -> None:
    second = plain.topk(2).indices[:, 1].tolist()
    for right in (depth, 0, 3):  # tokens of a draft that are right before it goes wrong
        verifier = make(target)
        logits, _ = verifier.prefill(prompt)
        check.add(logits[None], plain[:1])
        at = 1
        while at < len(answer):
            tree = _siblings(answer[at - 1 : at + depth], second[at : at + depth], right)
            logits, _ = verifier.verify(tree)
            # Follows the answer even past a near-tie that flipped: `add` has judged the flip.
            wanted = torch.tensor([*answer[at:], *[-1] * (depth + 1)])[tree.depths]
            path = tree.walk(wanted)
            check.add(logits[path], plain[at : at + len(path)])
            verifier.commit(path)
            at += len(path)


def _siblings(tokens: Sequence[int], others: Sequence[int], right: int) -> Tree:
    """A chain of the answer's own tokens, wrong after `right` of them, with the target's second choice beside each."""
    chain, parents, depths = [tokens[0]], [-1], [0]
    node = 0
    for d, (token, other) in enumerate(zip(tokens[1:], others, strict=False), start=1):
        for choice in (other, token):
            chain.append(choice)
            parents.append(node)
            depths.append(d)
        # beyond the right part, the wrong sibling is the one that is drafted on
        node = len(chain) - 1 if d <= right else len(chain) - 2
    return _tree(chain, parents, depths)


def _tree(tokens: list[int], parents: list[int], depths: list[int]) -> Tree:
    weights = torch.full((len(tokens),), float("nan"), dtype=torch.float64)
    return Tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths), weights)


def random_tree(random: torch.Generator, nodes: int, depth: int, words: Tensor) -> Tree:
    """`nodes` nodes under a root, depth at most `depth`, siblings distinct, tokens from `words`."""
    draw = lambda n: int(torch.randint(n, (), generator=random))  # noqa: E731
    tokens, parents, depths = [int(words[draw(len(words))])], [-1], [0]
    taken: list[set[int]] = [set()]
    while len(tokens) <= nodes:
        # half of the time on from the newest node, so that trees get deep as well as wide
        parent = len(tokens) - 1 if draw(2) else draw(len(tokens))
        token = int(words[draw(len(words))])
        if depths[parent] < depth and token not in taken[parent]:
            taken[parent].add(token)
            taken.append(set())
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return _tree(tokens, parents, depths)


def leaf_paths(tree: Tree) -> list[list[int]]:
    """Root paths that end in a leaf; every node lies on one."""
    parents = tree.parents.tolist()
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths


def plain_logits(
    target: Target, texts: Sequence[Sequence[int]], last: Sequence[int]
) -> list[Tensor]:
    """For each text [last, V]: the model's own logits after its last tokens, one forward without a cache.

    Padded on the right, which no causal layer can see.
    """
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    logits = target.model(input_ids=ids.to(target.device), use_cache=False).logits
    return [
        logits[i, len(text) - n : len(text)]
        for i, (text, n) in enumerate(zip(texts, last, strict=True))
    ]


def stepwise_logits(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """[len(answer) + 1, V]: the model's own logits, the prompt at once and then token by token from its own cache."""
    cache = new_cache(target.config)
    out = []
    for ids in (prompt, *[[token] for token in answer]):
        x = torch.tensor([list(ids)], device=target.device)
        hidden = target.decoder(input_ids=x, **cache_argument(target.decoder, cache))
        out.append(target.logits(hidden.last_hidden_state[0, -1:]))
    return torch.cat(out)


def test_prompt(target: Target, config: Config) -> list[int]:
    """A short chat in the target's own template."""
    renderer = Renderer(target.tokenizer, enable_thinking=config.target.enable_thinking)
    question = "Explain in two sentences why the sky is blue, then write a haiku about it."
    return renderer.prompt_ids([{"role": "user", "content": question}])


def long_prompt(target: Target, prompt: Sequence[int]) -> list[int]:
    """The prompt over and over, past the sliding window and one chunk of the prefill, if the target reads that far."""
    wanted = 8 + max(CHUNK, getattr(target.config, "sliding_window", None) or 0)
    most = getattr(target.config, "max_position_embeddings", wanted + 64) - 64
    return (list(prompt) * (1 + wanted // len(prompt)))[: max(min(wanted, most), len(prompt))]


def describe(target: Target) -> str:
    """Its layers by kind."""
    return ", ".join(f"{n} x {kind}" for kind, n in Counter(layer_kinds(target)).items())


def _words(target: Target) -> Tensor:
    """Tokens that a text may hold."""
    special = set(target.tokenizer.all_special_ids)
    return torch.tensor([i for i in range(len(target.tokenizer)) if i not in special])
