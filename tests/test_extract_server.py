"""Answers from an OpenAI-compatible server: the same as our own decoding, through failures and restarts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import extract.server
from configs.load import UserError, load_config
from configs.schema import TargetConfig
from extract.prompts import Chat, Renderer
from extract.regenerate import decode_batch, regenerate
from extract.server import Server
from extract.target import Target, load_target
from tests.conftest import write_config


class Engine(ThreadingHTTPServer):
    """A real server on loopback that answers with the tiny target. `failures` requests fail first."""

    def __init__(self, target: Target) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.failures, self.refuse, self.ids = target, 0, False, True
        self.lock, self.asked = threading.Lock(), 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine = self.server
        with engine.lock:
            engine.asked += 1
            engine.failures -= 1
            if engine.failures >= 0:
                if engine.failures % 2:
                    self.reply(503, {"error": "loading"})
                else:
                    self.connection.close()
                return
            if engine.refuse:
                self.reply(400, {"error": "prompt too long"})
                return
            ((ids, reason),) = decode_batch(engine.target, [body["prompt"]], body["max_tokens"])
        choice: dict[str, Any] = {
            "finish_reason": reason,
            "text": engine.target.tokenizer.decode(ids),
        }
        if engine.ids:
            choice["token_ids"] = ids
        self.reply(200, {"choices": [choice]})

    def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def engine(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(extract.server.time, "sleep", lambda _: None)
    target = load_target(TargetConfig(path=str(tiny_target), dtype="float32", device="cpu"))
    server = Engine(target)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def client(engine: Engine, tmp_path: Path, tiny_target: Path) -> Server:
    config = load_config(
        write_config(tmp_path / "config.yaml", tiny_target, data={"max_new_tokens": 12})
    )
    return Server(engine.url, config, engine.target.tokenizer)


def test_server_answers_are_our_answers_through_failures(engine, tmp_path, tiny_target):
    prompts = [[5, 9, 30], [7, 8, 11, 40, 2, 9], [100, 4]]
    engine.failures = 7
    assert client(engine, tmp_path, tiny_target).answer(prompts, 0) == decode_batch(
        engine.target, prompts, 12
    )


def test_a_server_that_gives_text_only_is_tokenized_once(engine, tmp_path, tiny_target):
    engine.ids = False
    tokenizer = engine.target.tokenizer
    prompts = [[5, 9, 30], [100, 4]]
    for (ids, reason), (own, own_reason) in zip(
        client(engine, tmp_path, tiny_target).answer(prompts, 0),
        decode_batch(engine.target, prompts, 12),
        strict=True,
    ):
        assert reason == own_reason
        assert tokenizer.decode(ids) == tokenizer.decode(own)


def test_refusals_and_silence_end_in_one_sentence(engine, tmp_path, tiny_target):
    served = client(engine, tmp_path, tiny_target)
    engine.refuse = True
    with pytest.raises(UserError, match="refused /v1/completions: 400"):
        served.answer([[5, 6]], 0)
    engine.refuse, engine.failures = False, 1000
    with pytest.raises(UserError, match="did not answer"):
        served.answer([[5, 6]], 0)


def test_nothing_is_lost_or_asked_twice_when_the_server_goes_away(engine, tmp_path, tiny_target):
    served = client(engine, tmp_path, tiny_target)
    renderer = Renderer(engine.target.tokenizer, enable_thinking=None)
    chats = [Chat(f"c{i}", ({"role": "user", "content": "x" * (i + 1)},), "test") for i in range(6)]

    def go(answer):
        return regenerate(
            chats,
            renderer,
            answer,
            tmp_path / "c",
            settings={},
            seed=0,
            batch_size=2,
            max_prompt_tokens=99,
        )[0]

    calls = 0

    def dies(prompts, seed):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return served.answer(prompts, seed)

    with pytest.raises(KeyboardInterrupt):
        go(dies)
    engine.asked = 0
    rows = go(served.answer)
    assert engine.asked == 2  # the last batch; the others were kept
    assert [row.id for row in rows] == [f"c{i}#0" for i in range(6)]
    expected = decode_batch(engine.target, [list(r.prompt_ids) for r in rows], 12)
    assert [(list(r.answer_ids), r.stop_reason) for r in rows] == expected
