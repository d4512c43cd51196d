"""Acceptance from an engine's counters is that of the rounds it made, and every way to misread them is refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from configs.load import UserError, load_config
from configs.schema import Config
from eval.engines import DRAFTED, DRAFTS, GENERATED, PER_POSITION, SECONDS, connect, parse_metrics
from eval.live import Question, questions
from eval.main import main
from eval.metrics import Answer, summarize
from eval.report import write_report
from eval.results import read_results
from eval.served import served_sets
from extract.choose import GREEDY
from extract.shards import ShardReader, plan
from tests.conftest import write_config
from tests.test_extract_shards import make_samples, store

# From /metrics of vLLM 0.32.0 (CPU) with a drafter of block size 4 after 25 answers, the model's path shortened.
RECORDED = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="SmolLM2"} 828.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="SmolLM2"} 1.7959940889904108e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="SmolLM2"} 2484.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="SmolLM2"} 466.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="SmolLM2",position="0"} 331.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="SmolLM2",position="1"} 105.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="SmolLM2",position="2"} 30.0
vllm:generation_tokens_total{engine="0",model_name="SmolLM2"} 1309.0
vllm:request_decode_time_seconds_bucket{engine="0",le="1920.0",model_name="SmolLM2"} 25.0
vllm:request_decode_time_seconds_count{engine="0",model_name="SmolLM2"} 25.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="SmolLM2"} 105.68345023200345
"""
BLOCK = 4


class Engine(ThreadingHTTPServer):
    """A real server on loopback that speaks as vLLM or SGLang and answers from a script.

    script: prompt -> the answer, and the drafts that each of its rounds accepted.
    """

    def __init__(self, script: dict[tuple[int, ...], tuple[list[int], list[int]]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.owner, self.speculates, self.ids = script, "vllm", True, True
        self.visitor = 0  # tokens that other requests generate while ours runs
        self.asked: list[dict[str, Any]] = []
        self.counts = parse_metrics(RECORDED)  # it has served others before
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def metrics(self) -> str:
        lines = []
        for line in RECORDED.splitlines():
            metric = re.match(r"(vllm:\w+)\{", line)
            position = re.search(r'position="(\d)"', line)
            key = metric[1] if metric else "", int(position[1]) if position else None
            if key in self.counts:
                line = f"{line.rpartition(' ')[0]} {self.counts[key]}"
            if self.speculates or "spec_decode" not in line:
                lines.append(line)
        return "\n".join(lines) + "\n"

    def decode(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        tokens, accepted = self.script[tuple(prompt)]
        self.counts[GENERATED, None] += len(tokens) + self.visitor
        self.counts[SECONDS, None] += 0.5
        for m in accepted:
            self.counts[DRAFTS, None] += 1
            self.counts[DRAFTED, None] += BLOCK - 1
            for k in range(m):
                self.counts[PER_POSITION, k] += 1
        return tokens, accepted


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        engine = self.server
        speculation = {
            "speculative_algorithm": "DFLASH" if engine.speculates else None,
            "speculative_num_draft_tokens": BLOCK,
        }
        replies = {
            "/v1/models": {"data": [{"id": "SmolLM2", "owned_by": engine.owner}]},
            "/version": {"version": "0.32.0"},
            "/server_info": {"version": "0.5.23", **speculation},
        }
        if self.path == "/metrics":
            self.reply(engine.metrics())
        else:
            self.reply(json.dumps(replies[self.path]))

    def do_POST(self) -> None:
        engine = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine.asked.append(body)
        tokens, accepted = engine.decode(body["prompt" if engine.owner == "vllm" else "input_ids"])
        if engine.owner == "vllm":
            choice: dict[str, Any] = {"text": "", "finish_reason": "length"}
            if engine.ids:
                choice["token_ids"] = tokens
            self.reply(json.dumps({"choices": [choice]}))
            return
        meta: dict[str, Any] = {"completion_tokens": len(tokens)}
        if accepted:
            meta |= {
                "spec_verify_ct": len(accepted),
                "spec_num_proposed_drafts": len(accepted) * (BLOCK - 1),
                "spec_correct_drafts_histogram": [
                    accepted.count(k) for k in range(max(accepted) + 1)
                ],
            }
        self.reply(json.dumps({"text": "", "output_ids": tokens, "meta_info": meta}))

    def reply(self, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


# Rounds as decoding makes them, in their order. The last one of the first answer is cut by one token.
ROUNDS = [[0, 3, 0, 1, 2], [1, 0, 0], [], [3, 3, 0, 2]]
CUT = [1, 0, 0, 0]


@pytest.fixture
def config(tmp_path: Path, tiny_target: Path) -> Config:
    return load_config(write_config(tmp_path / "config.yaml", tiny_target))


@pytest.fixture
def reader(tmp_path: Path) -> ShardReader:
    """Stored answers as long as those rounds make them, half of each sample."""
    lengths = [2 * (1 + sum(r) + len(r) - c) for r, c in zip(ROUNDS, CUT, strict=True)]
    plans = plan(lengths, shard_tokens=30, batch_tokens=30)
    return ShardReader(store(tmp_path / "states", make_samples(lengths), plans))


@pytest.fixture
def asked(config: Config, reader: ShardReader) -> list[Question]:
    return questions(config, reader)


@pytest.fixture
def engine(asked: list[Question]) -> Iterator[Engine]:
    server = Engine(
        {tuple(q.prompt): (q.answer, rounds) for q, rounds in zip(asked, ROUNDS, strict=True)}
    )
    yield server
    server.shutdown()
    server.server_close()


def serve(config: Config, engine: Engine, reader: ShardReader) -> tuple[dict[str, Any], list[str]]:
    (row,), notes = served_sets(config, connect(engine.url), BLOCK, {"chat": reader})
    return row, notes


def test_the_recorded_metrics_of_vllm():
    both = RECORDED + RECORDED.replace('engine="0"', 'engine="1"')
    for text, engines in ((RECORDED, 1), (both, 2)):
        assert parse_metrics(text) == pytest.approx(
            {
                (DRAFTS, None): 828 * engines,
                (DRAFTED, None): 2484 * engines,
                (PER_POSITION, 0): 331 * engines,
                (PER_POSITION, 1): 105 * engines,
                (PER_POSITION, 2): 30 * engines,
                (GENERATED, None): 1309 * engines,
                (SECONDS, None): 105.68345023200345 * engines,
            }
        )


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_the_row_is_that_of_the_rounds(config, engine, reader, asked, tmp_path, owner):
    engine.owner = owner
    row, notes = serve(config, engine, reader)
    # counted by hand from ROUNDS
    assert row["rounds"] == 12 and row["accepted"] == 15 and row["drafted"] == 36
    assert row["tau"] == 1 + 15 / 12
    assert row["histogram"] == [5, 2, 2, 3]
    assert row["accept_at_position"] == [7 / 12, 5 / 12, 3 / 12]
    assert row["tokens"] == sum(len(q.answer) for q in asked) == 4 + 12 + 15 - 1
    assert row["cut_rounds"] == 1 and row["lossless"] is None
    assert row["tokens_per_second"] == (26 / 2.0 if owner == "vllm" else None)
    assert "as live counts, tau is 2.167" in notes[1] and "4 of 4 answers equal" in notes[1]
    told = summarize(
        [
            Answer(
                prompt_id=q.id,
                committed=tuple(m + 1 for m in rounds),
                accepted=tuple(rounds),
                tokens=1 + sum(rounds) + len(rounds),
                phases=None,
                drafted=3 * len(rounds),
            )
            for q, rounds in zip(asked, ROUNDS, strict=True)
        ],
        dataset="chat", decoder="dflash", budget=None, temperature=0.0, block_size=BLOCK, lossless=None,
    ).as_dict()  # fmt: skip
    for key in ("ci95", "tau_mean_of_responses", "tau_quartiles_of_responses", "short_answers"):
        assert row[key] == told[key], key
    results = {
        "schema": 1,
        "mode": "served",
        "target": {"id": "toy"},
        "provenance": {},
        "rows": [row],
    }
    results |= {"checkpoint": {"path": "x", "step": 3, "fingerprint": None}, "notes": notes}
    write_report(tmp_path, results, [])
    assert read_results(tmp_path / "results.json")["rows"] == [row]
    assert "near-ties" in (tmp_path / "report.md").read_text()


def test_what_the_server_is_asked(config, engine, reader, asked):
    served_sets(config, connect(engine.url), BLOCK, {"chat": reader})
    first, *others = engine.asked
    assert (first["prompt"], first["max_tokens"]) == (asked[0].prompt, 8)  # warm-up, not counted
    assert [body["prompt"] for body in others] == [q.prompt for q in asked]
    for body in others:
        assert body["max_tokens"] == config.eval.max_new_tokens
        assert (body["temperature"], body["repetition_penalty"], body["top_k"]) == (0, 1, -1)
    few = config.model_copy(update={"eval": config.eval.model_copy(update={"live_prompts": 2})})
    row, _ = serve(few, engine, reader)
    assert row["prompts"] == 2
    engine.owner = "sglang"
    serve(config, engine, reader)
    body = engine.asked[-1]
    assert body["input_ids"] == asked[-1].prompt
    assert body["sampling_params"].items() >= {"temperature": 0, "repetition_penalty": 1}.items()
    assert body["sampling_params"]["max_new_tokens"] == config.eval.max_new_tokens


def test_an_answer_that_differs_later_is_counted_and_told(config, engine, reader, asked):
    for q, rounds in zip(asked[:2], ROUNDS, strict=False):
        engine.script[tuple(q.prompt)] = ([*q.answer[:-1], 999], rounds)
    row, notes = serve(config, engine, reader)
    assert row["rounds"] == 12 and "2 of 4 answers equal" in notes[1]


def test_a_silent_server():
    with pytest.raises(UserError, match=r"did not answer /v1/models \(.*when it is up"):
        connect("http://127.0.0.1:9")


def test_servers_that_cannot_be_measured_are_refused(config, engine, reader, asked):
    engine.owner = "somebody"
    with pytest.raises(UserError, match="somebody"):
        serve(config, engine, reader)
    for owner, flag in (("vllm", "--speculative-config"), ("sglang", "--speculative-algorithm")):
        engine.owner, engine.speculates = owner, False
        with pytest.raises(UserError, match=flag):
            serve(config, engine, reader)
    engine.owner, engine.speculates, engine.ids = "vllm", True, False
    with pytest.raises(UserError, match="return_token_ids"):
        serve(config, engine, reader)


def test_another_drafter_is_refused(config, engine, reader):
    with pytest.raises(UserError, match="drafts 3 tokens a round and the checkpoint 7"):
        served_sets(config, connect(engine.url), 8, {"chat": reader})
    assert not engine.asked


def test_another_target_is_refused(config, engine, reader, asked):
    for q, rounds in zip(asked, ROUNDS, strict=True):
        engine.script[tuple(q.prompt)] = ([(q.answer[0] + 1) % 300, *q.answer[1:]], rounds)
    with pytest.raises(UserError, match=r"4 of 4 answers .* this run's target, toy"):
        serve(config, engine, reader)


def test_other_traffic_is_noticed_during_and_between_answers(config, engine, reader, asked):
    client = connect(engine.url)
    engine.visitor = 1
    with pytest.raises(UserError, match="other traffic"):
        client.answer(asked[0].prompt, 20, GREEDY, 0)
    engine.visitor = 0
    client.answer(asked[0].prompt, 20, GREEDY, 0)
    engine.decode(asked[1].prompt)
    with pytest.raises(UserError, match="other traffic"):
        client.answer(asked[0].prompt, 20, GREEDY, 0)


@pytest.mark.parametrize("rounds", [ROUNDS[0][:-1], [*ROUNDS[0], 3]])
def test_rounds_that_do_not_make_the_answer_are_refused(config, engine, reader, asked, rounds):
    """Fewer: the engine decoded without drafts, near its context limit. More: it counted what is not ours."""
    engine.script[tuple(asked[0].prompt)] = (asked[0].answer, rounds)
    with pytest.raises(UserError, match=f"for an answer of {len(asked[0].answer)}"):
        serve(config, engine, reader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "served"], "--server URL"),
        (["--mode", "live", "--server", "http://127.0.0.1:9"], "--mode served"),
        (["--mode", "served", "--server", "http://x", "--checkpoint", "all"], "one drafter"),
    ],
)
def test_the_command_line(tiny_target, tmp_path, arguments, message):
    config = write_config(tmp_path / "config.yaml", tiny_target)
    with pytest.raises(UserError, match=message):
        main(["--config", str(config), *arguments])
