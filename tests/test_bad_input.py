"""Whatever lies in a file or comes from a server: it is read, or it is refused in one sentence. Never a traceback.

Results files and configs have such tests beside their readers (test_eval_report.py, test_configs_load.py).
"""

from __future__ import annotations

import copy
import json
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import extract.server
from configs.load import UserError, load_config
from configs.schema import Config
from eval.engines import connect
from extract.choose import GREEDY
from extract.head import FILE, TargetHead, load_head, save_head
from extract.manifest import MANIFEST, Manifest, read_manifest
from extract.prompts import Chat, load_chats
from extract.regenerate import _write_batch, answers_so_far, read_batch
from extract.server import Server
from extract.shards import ShardReader, noted
from tests.conftest import tiny_tokenizer, write_config
from tests.test_eval_served import RECORDED
from tests.test_extract_shards import PLAN, PLANS, store

NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 1 << 31, 1 << 62, 1 << 64, 10**30])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
DEEP = b"[" * 100_000
many = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in inner:
        yield from places(part, (*at, key))


def changed(draw: Callable[[Any], Any], document: Any) -> Any:
    """The document with one value replaced, left out or doubled somewhere."""
    whole = [copy.deepcopy(document)]
    at = (0, *draw(st.sampled_from(list(places(document)))))
    holder: Any = whole
    for key in at[:-1]:
        holder = holder[key]
    how = draw(st.sampled_from(["replace", "replace", "remove", "more"]))
    if how == "remove" and len(at) > 1:
        del holder[at[-1]]
    elif how == "more" and isinstance(holder[at[-1]], list):
        holder[at[-1]] += holder[at[-1]] or [draw(JSON)]
    elif how == "more" and isinstance(holder[at[-1]], dict):
        holder[at[-1]][draw(st.text(max_size=8))] = draw(JSON)
    else:
        holder[at[-1]] = draw(JSON)
    return whole[0]


T = TypeVar("T")


def read_or_refused(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return None


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store(tmp_path_factory.mktemp("states"))


@many
@given(st.data())
def test_manifests(states: Path, data: st.DataObject) -> None:
    document = changed(data.draw, json.loads((states / MANIFEST).read_text()))
    raw = data.draw(st.just(json.dumps(document).encode()) | st.binary(max_size=50) | st.just(DEEP))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST).write_bytes(raw)
        found = read_or_refused(lambda: read_manifest(Path(folder)))
    assert found is None or isinstance(found, Manifest)


@many
@given(st.data())
def test_shard_headers(states: Path, data: st.DataObject) -> None:
    """A header may say anything of shapes, spans, types and names: what comes out has the manifest's sizes."""
    path = states / PLANS[1].name
    good = path.read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0]
    text = json.dumps(changed(data.draw, json.loads(good[8:end]))).encode()
    length = data.draw(
        st.just(len(text)) | st.sampled_from([0, 1, 1 << 20, 1 << 40, (1 << 64) - 1])
    )
    try:
        path.write_bytes(struct.pack("<Q", length) + text + good[end:])

        def read() -> int:
            reader = ShardReader(states)
            for i, size in enumerate(reader.lengths):
                sample = reader[i]
                assert len(sample.input_ids) == len(sample.hidden_states) == size
            return sum(reader.lengths)

        total = read_or_refused(read)
        assert total in (None, read_manifest(states).totals.tokens)
    finally:
        path.write_bytes(good)


@many
@given(st.data())
def test_sidecars(states: Path, data: st.DataObject) -> None:
    name = PLANS[0].name
    good = json.loads((states / name).with_suffix(".json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        file = (Path(folder) / name).with_suffix(".json")
        file.write_text(json.dumps(changed(data.draw, good)))
        entry = noted(Path(folder), name, PLAN)
        assert entry is None or entry.file == name
        file.write_bytes(DEEP)
        assert noted(Path(folder), name, PLAN) is None


@pytest.fixture(scope="module")
def head_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("head")
    table = torch.randn(20, 4)
    save_head(TargetHead(table, table + 1, soft_cap=3.0), folder, torch.float32)
    return (folder / FILE).read_bytes()


@many
@given(st.data())
def test_head_files(head_file: bytes, data: st.DataObject) -> None:
    end = 8 + struct.unpack("<Q", head_file[:8])[0]
    header = json.loads(head_file[8:end])
    if data.draw(st.booleans()):
        use = changed(data.draw, json.loads(header["__metadata__"]["use"]))
        header["__metadata__"]["use"] = json.dumps(use)
    else:
        header = changed(data.draw, header)
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_bytes(struct.pack("<Q", len(text)) + text + head_file[end:])
        found = read_or_refused(lambda: load_head(Path(folder)))
    assert found is None or isinstance(found, TargetHead)


@many
@given(st.data())
def test_answers(data: st.DataObject) -> None:
    """A file of answers is whole, or made anew."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "turn0-batch-000000.jsonl"
        chats = [Chat(f"c{i}", (), "test") for i in range(2)]
        batch = [(0, [1, 2]), (1, [3])]
        _write_batch(file, "stamp", chats, 0, batch, [([4, 5], "stop"), ([6], "length")])
        rows = read_batch(file, "stamp")
        assert rows is not None and answers_so_far(folder) == rows
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        bad = changed(data.draw, lines)
        text = "\n".join(map(json.dumps, bad)) if isinstance(bad, list) else json.dumps(bad)
        raw = data.draw(st.just(text.encode()) | st.binary(max_size=50) | st.just(DEEP))
        file.write_bytes(raw)
        assert read_batch(file, None) in (None, rows)
        assert answers_so_far(folder) in ([], rows)


CHAT = {"id": "a", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        "conversations": [{"from": "human", "value": "q"}], "turns": ["one"], "prompt": "p"}  # fmt: skip


@many
@given(st.data())
def test_prompt_files(data: st.DataObject) -> None:
    row = {key: CHAT[key] for key in data.draw(st.sets(st.sampled_from(sorted(CHAT))))}
    rows = [changed(data.draw, row) for _ in range(2)]
    text = (
        "".join(json.dumps(r) + "\n" for r in rows)
        if data.draw(st.booleans())
        else json.dumps(rows)
    )
    raw = data.draw(st.just(text.encode()) | st.binary(max_size=50) | st.just(DEEP))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / data.draw(st.sampled_from(["x.jsonl", "x.json"]))
        file.write_bytes(raw)
        found = read_or_refused(lambda: load_chats([str(file)]))
    if isinstance(found, tuple):
        chats, report = found
        assert all(isinstance(m["content"], str) for chat in chats for m in chat.messages)
        assert report.kept == len(chats) > 0


# ---- servers


class Liar(ThreadingHTTPServer):
    """Says what it is told, path by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Says)
        self.says: dict[str, bytes] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Says(BaseHTTPRequestHandler):
    server: Liar

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = self.server.says.get(self.path, b"")
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    server = Liar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract.server.time, "sleep", lambda _: None)
        yield server
    server.shutdown()
    server.server_close()


MODELS = {"data": [{"id": "m", "owned_by": "vllm"}]}
COMPLETION = {"choices": [{"text": "x", "finish_reason": "stop", "token_ids": [5, 2]}],
              "kv_transfer_params": {"hidden_states_path": "/x/y"}}  # fmt: skip
SGLANG = {
    "/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]},
    "/server_info": {"version": "0.5", "speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 4},
    "/generate": {"output_ids": [5, 7, 9], "meta_info": {
        "spec_correct_drafts_histogram": [1, 1], "spec_num_proposed_drafts": 6}},
}  # fmt: skip
VLLM = {"/v1/models": MODELS, "/version": {"version": "0.32"}, "/v1/completions": COMPLETION}


def tell(liar: Liar, draw: Callable[[Any], Any], said: dict[str, Any]) -> None:
    """All of it, with one of the answers changed."""
    liar.says = {path: json.dumps(body).encode() for path, body in said.items()}
    path = draw(st.sampled_from(sorted(said)))
    answer = json.dumps(changed(draw, said[path])).encode()
    liar.says[path] = draw(st.just(answer) | st.binary(max_size=20) | st.just(DEEP))


@pytest.fixture(scope="module")
def asking(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Any]:
    file = tmp_path_factory.mktemp("asking") / "config.yaml"
    return load_config(write_config(file, tiny_target)), tiny_tokenizer()


@many
@given(st.data())
def test_servers_that_answer_prompts(
    liar: Liar, asking: tuple[Config, Any], data: st.DataObject
) -> None:
    tell(liar, data.draw, {"/v1/models": MODELS, "/v1/completions": COMPLETION})
    url = f"http://127.0.0.1:{liar.server_address[1]}"
    found = read_or_refused(lambda: Server(url, *asking).answer([[1, 2]], 0))
    if isinstance(found, list):
        ((ids, reason),) = found
        assert all(0 <= i < 1 << 31 for i in ids) and reason in ("stop", "length")


@many
@given(st.data(), st.sampled_from(["vllm", "sglang"]))
def test_servers_that_are_measured(liar: Liar, data: st.DataObject, owner: str) -> None:
    tell(liar, data.draw, VLLM if owner == "vllm" else SGLANG)
    lines = RECORDED.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    value = data.draw(st.sampled_from(["NaN", "+Inf", "1e400", "-5", "9e18", "x", ""]))
    lines[at] = lines[at].rpartition(" ")[0] + f" {value}"
    liar.says["/metrics"] = "\n".join(lines).encode()
    url = f"http://127.0.0.1:{liar.server_address[1]}"
    served = read_or_refused(lambda: connect(url).answer([1, 2], 8, GREEDY, 0))
    assert served is None or sum(served.rounds) <= len(served.tokens)


def test_addresses_that_are_none() -> None:
    for url in ("http://[::1", "nothing", "ftp://x", "http://", "http://127.0.0.1:99999"):
        assert read_or_refused(partial(connect, url)) is None
