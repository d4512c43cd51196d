"""Serving engines, and what they count about speculative decoding.

vLLM adds up all requests at `/metrics`; what one answer took is the difference of two readings, true only while nobody
else uses the server. SGLang reports every request's counts with its answer (read from the source of 0.5.23; vLLM's
format is that of a running 0.32).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, Field

from configs.load import UserError
from extract.choose import Sampler
from extract.server import NO_FILTERS, Client, TokenIds

DRAFTS, DRAFTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GENERATED, SECONDS = "vllm:generation_tokens_total", "vllm:request_decode_time_seconds_sum"
PLAIN = (DRAFTS, DRAFTED, GENERATED, SECONDS)
METRIC = re.compile(rf"^({'|'.join((*PLAIN, PER_POSITION))})\{{(.*)\}} (\S+)$", re.M)
POSITION = re.compile(r'(?:^|,)position="(\d{1,4})"')
Count = Annotated[int, Field(ge=0)]


class Version(BaseModel):
    version: str | None = None


class SglangInfo(Version):
    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: Annotated[int, Field(ge=2)] | None = None


class SglangMeta(BaseModel):
    spec_correct_drafts_histogram: list[Count] | None = None
    spec_num_proposed_drafts: Count = 0


class SglangAnswer(BaseModel):
    output_ids: TokenIds
    meta_info: SglangMeta


@dataclass(frozen=True)
class Served:
    """One answer and the rounds that the engine counted for it. The first token is the prefill's, of no round."""

    tokens: list[int]
    # [k]: rounds that accepted k drafts; whole, also where a stop cuts the last one short
    rounds: tuple[int, ...]
    drafted: int
    seconds: float | None  # of decoding, without the prefill

    @property
    def accepted(self) -> tuple[int, ...]:
        """Accepted drafts of each round, in an order that the engine does not tell."""
        return tuple(k for k, count in enumerate(self.rounds) for _ in range(count))


class Engine(Protocol):
    name: str
    block_size: int  # drafted tokens per round, plus one

    def answer(self, prompt: list[int], limit: int, sampler: Sampler, seed: int) -> Served: ...


def connect(url: str) -> Engine:
    """The engine behind a URL. UserError when nothing answers, or it has no drafter."""
    client = Client(url, attempts=1)  # a request that was sent twice would be counted twice
    card = client.model()
    match card.get("owned_by"):
        case "vllm":
            return Vllm(client, card)
        case "sglang":
            return Sglang(client, card)
        case owner:
            raise UserError(
                f"the server at {client.url} says that it is {owner}; "
                "acceptance counters are read from vLLM and SGLang"
            )


def requested(sampler: Sampler) -> dict[str, float]:
    """The sampling fields of a request: every one of them, or the target's generation_config.json would fill it in."""
    return {"temperature": sampler.temperature, **NO_FILTERS, **sampler.settings}


class Vllm:
    def __init__(self, client: Client, card: dict[str, Any]) -> None:
        self.client, self.model = client, str(card["id"])
        self.counters = self._read()
        self.block_size = 1 + sum(name == PER_POSITION for name, _ in self.counters)
        self.name = f"vLLM {client.read(Version, 'GET', '/version').version}, model {self.model}"

    def answer(self, prompt: list[int], limit: int, sampler: Sampler, seed: int) -> Served:
        choice = self.client.complete(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": limit,
                "seed": seed,
                **requested(sampler),
            }
        )
        tokens: list[int] | None = choice.get("token_ids")
        if tokens is None:
            raise UserError(
                f"the server at {self.client.url} returned no token ids; vLLM must know return_token_ids"
            )
        # From the last answer's reading on, so that nothing between two answers escapes either.
        before, self.counters = self.counters, self._read()
        moved = {key: value - before.get(key, 0.0) for key, value in self.counters.items()}
        if moved[GENERATED, None] != len(tokens):
            raise UserError(
                f"the server at {self.client.url} generated {moved[GENERATED, None]:.0f} tokens where its "
                f"answer has {len(tokens)}: other traffic moves its counters; evaluate on an idle server"
            )
        # A draft is accepted only after all before it, so [k] counts the rounds that accepted more than k.
        more = [moved.get((PER_POSITION, k), 0.0) for k in range(self.block_size - 1)]
        exactly = zip([moved[DRAFTS, None], *more], [*more, 0.0], strict=True)
        rounds = tuple(int(this - rest) for this, rest in exactly)
        drafted, seconds = int(moved[DRAFTED, None]), moved[SECONDS, None]
        return possible(Served(tokens, rounds, drafted, seconds), self.client)

    def _read(self) -> dict[tuple[str, int | None], float]:
        counters = parse_metrics(self.client.text("/metrics"))
        positions = max(sum(name == PER_POSITION for name, _ in counters), 1)
        needed = {(name, None) for name in PLAIN} | {(PER_POSITION, k) for k in range(positions)}
        if not needed <= counters.keys():
            raise UserError(
                f"the server at {self.client.url} counts no speculative decoding; "
                "start vLLM with --speculative-config and without --disable-log-stats"
            )
        return counters


def possible(served: Served, client: Client) -> Served:
    """The same. UserError for counts of no answer, before anything is made as large as they say."""
    rounds = sum(served.rounds)
    if min(served.rounds, default=0) < 0 or rounds > len(served.tokens):
        raise UserError(
            f"the server at {client.url} counts {rounds} rounds for an answer of {len(served.tokens)} tokens; "
            "start it anew and evaluate while nobody else uses it"
        )
    return served


def parse_metrics(text: str) -> dict[tuple[str, int | None], float]:
    """Prometheus text -> the counters of interest by name and draft position, summed over a server's engines.

    UserError for a counter that is no number.
    """
    counters: dict[tuple[str, int | None], float] = {}
    for name, labels, value in METRIC.findall(text):
        position = POSITION.search(labels)
        key = name, int(position[1]) if position else None
        try:
            counters[key] = counters.get(key, 0.0) + float(value)
        except ValueError:
            counters[key] = math.nan
        if not math.isfinite(counters[key]):
            raise UserError(f"the server's /metrics says that {name} is {value}, which is no count")
    return counters


class Sglang:
    def __init__(self, client: Client, card: dict[str, Any]) -> None:
        self.client = client
        info = client.read(SglangInfo, "GET", "/server_info")
        if not info.speculative_algorithm or info.speculative_num_draft_tokens is None:
            raise UserError(
                f"the server at {client.url} has no drafter; start SGLang with "
                "--speculative-algorithm DFLASH and --speculative-draft-model-path"
            )
        self.block_size = info.speculative_num_draft_tokens
        self.name = f"SGLang {info.version}, model {card['id']}"

    def answer(self, prompt: list[int], limit: int, sampler: Sampler, seed: int) -> Served:
        # no seed: SGLang takes one in its deterministic mode only
        sampling = {"max_new_tokens": limit, **requested(sampler)}
        body = {"input_ids": prompt, "sampling_params": sampling}
        out = self.client.read(SglangAnswer, "POST", "/generate", body)
        tokens, rounds = out.output_ids, out.meta_info.spec_correct_drafts_histogram or []
        if len(tokens) > 1 and not rounds:
            raise UserError(
                f"the server at {self.client.url} reports no spec_correct_drafts_histogram "
                "with its answers; use an SGLang that does (0.5.23)"
            )
        drafted = out.meta_info.spec_num_proposed_drafts
        return possible(Served(tokens, tuple(rounds), drafted, seconds=None), self.client)
