"""Serving engines, and what they count about speculative decoding.

vLLM adds up all requests at `/metrics`; what one answer took is the difference of two readings, true only while nobody
else uses the server. SGLang reports every request's counts with its answer (read from the source of 0.5.23; vLLM's
format is that of a running 0.32).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from configs.load import UserError
from extract.choose import Sampler
from extract.server import NO_FILTERS, Client

DRAFTS, DRAFTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GENERATED, SECONDS = "vllm:generation_tokens_total", "vllm:request_decode_time_seconds_sum"
PLAIN = (DRAFTS, DRAFTED, GENERATED, SECONDS)
METRIC = re.compile(rf"^({'|'.join((*PLAIN, PER_POSITION))})\{{(.*)\}} (\S+)$", re.M)
POSITION = re.compile(r'(?:^|,)position="(\d+)"')


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
        self.name = f"vLLM {client.json('GET', '/version').get('version')}, model {self.model}"

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
        more = [moved[PER_POSITION, k] for k in range(self.block_size - 1)]
        exactly = zip([moved[DRAFTS, None], *more], [*more, 0.0], strict=True)
        return Served(
            tokens=tokens,
            rounds=tuple(int(this - rest) for this, rest in exactly),
            drafted=int(moved[DRAFTED, None]),
            seconds=moved[SECONDS, None],
        )

    def _read(self) -> dict[tuple[str, int | None], float]:
        counters = parse_metrics(self.client.text("/metrics"))
        if not {*((name, None) for name in PLAIN), (PER_POSITION, 0)} <= counters.keys():
            raise UserError(
                f"the server at {self.client.url} counts no speculative decoding; "
                "start vLLM with --speculative-config and without --disable-log-stats"
            )
        return counters


def parse_metrics(text: str) -> dict[tuple[str, int | None], float]:
    """Prometheus text -> the counters of interest by name and draft position, summed over a server's engines."""
    counters: dict[tuple[str, int | None], float] = {}
    for name, labels, value in METRIC.findall(text):
        position = POSITION.search(labels)
        key = name, int(position[1]) if position else None
        counters[key] = counters.get(key, 0.0) + float(value)
    return counters


class Sglang:
    def __init__(self, client: Client, card: dict[str, Any]) -> None:
        self.client = client
        info = client.json("GET", "/server_info")
        if not info.get("speculative_algorithm"):
            raise UserError(
                f"the server at {client.url} has no drafter; start SGLang with "
                "--speculative-algorithm DFLASH and --speculative-draft-model-path"
            )
        self.block_size = int(info["speculative_num_draft_tokens"])
        self.name = f"SGLang {info.get('version')}, model {card['id']}"

    def answer(self, prompt: list[int], limit: int, sampler: Sampler, seed: int) -> Served:
        # no seed: SGLang takes one in its deterministic mode only
        sampling = {"max_new_tokens": limit, **requested(sampler)}
        body = {"input_ids": prompt, "sampling_params": sampling}
        out = self.client.json("POST", "/generate", body)
        tokens, counts = out["output_ids"], out["meta_info"]
        rounds = counts.get("spec_correct_drafts_histogram") or []
        if len(tokens) > 1 and not rounds:
            raise UserError(
                f"the server at {self.client.url} reports no spec_correct_drafts_histogram "
                "with its answers; use an SGLang that does (0.5.23)"
            )
        drafted = int(counts.get("spec_num_proposed_drafts", 0))
        return Served(tokens, tuple(rounds), drafted, seconds=None)
