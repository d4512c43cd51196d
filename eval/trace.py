"""The round viewer: how prompts were decoded, round by round, as one HTML page.

A Recorder watches the decode loop itself, so the page shows what happened and nothing is decoded in another way for it.
trace.html is the page with a place for the record; it asks the network for nothing. The format of the record is this
module's and that page's own affair.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from configs.load import UserError
from configs.schema import Config
from eval.decode import Round, decode, propose_chain, propose_tree
from eval.live import Question, question, seeded
from eval.metrics import Json
from extract.choose import Sampler
from extract.head import TargetHead
from extract.shards import ShardReader
from extract.target import Target
from train.drafter import DFlashDrafter

TEMPLATE = Path(__file__).with_name("trace.html")
PLACE = "@RECORD@"  # in the template
DRAFTER_TOP, TARGET_TOP = 6, 4  # tokens of a distribution that the page shows


class Asked(NamedTuple):
    dataset: str
    number: int  # in the data set, which decides the draws
    question: Question


def choose(sets: dict[str, ShardReader], count: int) -> list[Asked]:
    """`count` held-out prompts, one of each set in turn. UserError when there are fewer."""
    held = sum(map(len, sets.values()))
    if count > held:
        raise UserError(f"--trace {count} asks for more than the {held} held-out prompts; lower it")
    longest = max(map(len, sets.values()))
    order = [(name, i) for i in range(longest) for name in sets if i < len(sets[name])]
    return [Asked(name, i, question(sets[name], i)) for name, i in order[:count]]


def trace(
    config: Config,
    target: Target,
    drafter: DFlashDrafter,
    head: TargetHead,
    prompts: Sequence[Asked],
) -> Json:
    """The record of these prompts, each decoded as a chain and with the largest tree of eval.budgets.

    As `live` decodes them, with the same draws. UserError when there is no budget.
    """
    options, sampler = config.eval, Sampler.of(config.eval)
    if not options.budgets:
        raise UserError("--trace shows the largest tree of eval.budgets, which is empty; name one")
    budget = max(options.budgets)
    proposals = {
        "chain": propose_chain,
        "tree": propose_tree(budget, keep_chain=options.keep_chain),
    }
    pieces = Pieces(target.tokenizer)
    traced: list[Json] = []
    for name, number, asked in prompts:
        runs: Json = {}
        for decoder, propose in proposals.items():
            recorder = Recorder(pieces, sampler, asked.prompt)
            decoded = decode(
                target, drafter, head, asked.prompt, propose,
                max_new_tokens=options.max_new_tokens,
                sampler=sampler,
                generator=seeded(config, target, number),
                watch=recorder,
            )  # fmt: skip
            runs[decoder] = {
                "tokens": pieces.places(decoded.tokens),
                "rounds": recorder.rounds,
            }
        prompt = pieces.places(asked.prompt)
        traced.append({"id": asked.id, "set": name, "prompt": prompt, **runs})
    return {
        "target": target.label,
        "dtype": options.dtype,
        "decoding": ", ".join(f"{k} {v:g}" for k, v in sampler.settings.items()) or "greedy",
        "block_size": drafter.shape.drafts + 1,
        "budget": budget,
        "keep_chain": options.keep_chain,
        "pieces": pieces.texts,
        "prompts": traced,
    }


class Recorder:
    """Watches one decode and keeps what the page shows of each round, ready for JSON."""

    def __init__(self, pieces: Pieces, sampler: Sampler, prompt: Sequence[int]) -> None:
        self.pieces, self.sampler = pieces, sampler
        self.text = list(prompt)  # up to the root of the coming round, the root not included
        self.rounds: list[Json] = []

    @torch.inference_mode()
    def __call__(self, seen: Round) -> None:
        tree, slots = seen.tree, seen.draft.double().log_softmax(-1)
        nodes, drafted = tree.tokens.tolist(), len(slots)
        at = (tree.depths[1:] - 1).to(slots.device), tree.tokens[1:].to(slots.device)
        wanted = torch.tensor(seen.chosen[:drafted], device=slots.device)
        reached = slots[: len(wanted)]
        given = reached.gather(1, wanted[:, None])
        after = self._target(seen, nodes)
        rows = torch.tensor(seen.chosen, device=after.device)[:, None]
        self.rounds.append(
            {
                # the drafter, by slot: [[tokens, probabilities], ...]
                "slots": self._top(slots.exp(), DRAFTER_TOP),
                # the tree: of each node its token, its parent and the drafter's probability of it in its slot
                "tokens": self.pieces.places(nodes),
                "parents": tree.parents.tolist(),
                "q": [1.0, *short(slots[at].exp())],
                # the target: the nodes it visited and after each of them its choice and its likeliest tokens
                "path": seen.path,
                "chosen": self.pieces.places(seen.chosen),
                "p": short(after.gather(1, rows)[:, 0]),
                "target": self._top(after, TARGET_TOP),
                # what the drafter thought of those choices, as far as it has slots
                "wanted_q": short(given.exp()[:, 0]),
                "wanted_rank": (1 + (reached > given).sum(1)).tolist(),
                "committed": seen.committed,
            }
        )
        self.text += [nodes[0], *seen.chosen[:-1]]

    def _target(self, seen: Round, nodes: list[int]) -> Tensor:
        """The target's distribution after each node of the path, [len(path), V], as the sampler draws from it."""
        text = self.text + [nodes[i] for i in seen.path]
        first = len(text) - len(seen.path) + 1
        rows = [
            self.sampler.scores(
                seen.logits[node][None],
                torch.tensor([text[: first + i]], device=seen.logits.device),
            )
            for i, node in enumerate(seen.path)
        ]
        return torch.cat(rows).double().softmax(-1)

    def _top(self, rows: Tensor, count: int) -> list[list[list[Any]]]:
        values, tokens = rows.topk(min(count, rows.shape[1]))
        return [
            [self.pieces.places(t), short(v)] for t, v in zip(tokens.tolist(), values, strict=True)
        ]


def short(values: Tensor) -> list[float]:
    """Three significant digits, for a page of a megabyte rather than of ten."""
    return [float(f"{value:.3g}") for value in values.tolist()]


class Pieces:
    """The texts of the tokens that a record speaks of, each kept once; the record holds their places in `texts`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []
        self._place: dict[int, int] = {}

    def places(self, tokens: Iterable[int]) -> list[int]:
        for token in (tokens := list(tokens)):
            if token not in self._place:
                self._place[token] = len(self.texts)
                self.texts.append(piece(self.tokenizer, token))
        return [self._place[token] for token in tokens]


def piece(tokenizer: Any, token: int) -> str:
    r"""The text of one token. Bytes that are no whole characters by themselves are written as \xf0.

    Decoding alone would not do: it shows such bytes as U+FFFD, and SentencePiece's drops a leading space.
    """
    if token >= len(tokenizer):
        return f"<unused {token}>"  # a row that pads the embedding
    raw: str = tokenizer.convert_ids_to_tokens(token)
    if token in tokenizer.added_tokens_decoder:
        return raw
    if "▁" in raw:
        return raw.replace("▁", " ")
    text: str = tokenizer.decode([token])
    if "\ufffd" in text and set(raw) <= byte_of().keys():
        return bytes(byte_of()[c] for c in raw).decode("utf-8", errors="backslashreplace")
    return text


@cache
def byte_of() -> dict[str, int]:
    """Byte-level tokenizers write each byte as one printable character."""
    return {character: byte for byte, character in bytes_to_unicode().items()}


def page(record: Json) -> str:
    """The record as a self-contained page. Any text may be in it: no character of the record is markup."""
    data = json.dumps(record, separators=(",", ":"), allow_nan=False)  # ASCII only
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = TEMPLATE.read_text(encoding="utf-8")
    assert template.count(PLACE) == 1
    return template.replace(PLACE, data)
