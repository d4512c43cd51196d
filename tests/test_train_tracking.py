"""The log survives kills and resumes; wandb gets the same on a step axis of its own, and never stops a run."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from eval.track import log_results
from tests.conftest import write_config
from train.tracking import Tracker


def offline_rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """History rows of an offline run, once there are so many: wandb's service may still be writing."""
    for _ in range(100):
        records = offline_records(folder, "history")
        if len(records) == count:
            break
        time.sleep(0.2)
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.item}
        for record in records
    ]


def offline_records(folder: Path, kind: str) -> list[Any]:
    """Records of an offline run: a .wandb file is a 7-byte header and then a LevelDB log of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, found, at, whole = file.read_bytes(), [], 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, part = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # a full record, or the last part of one
            record, whole = Record.FromString(whole), b""
            if record.HasField(kind):
                found.append(getattr(record, kind))
    return found


@pytest.fixture
def config(tmp_path: Path, tiny_target: Path):
    def make(mode: str):
        return load_config(write_config(tmp_path / "c.yaml", tiny_target, tracking={"wandb": mode}))

    return make


def test_resume_drops_what_the_checkpoint_does_not_know(tmp_path, config):
    first = Tracker(tmp_path, config("disabled"), stage="train", resume_step=None)
    for step in range(1, 13):
        first.log({"step": step, "loss": 1.0})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 13, "lo')  # killed in the middle of a line
    second = Tracker(tmp_path, config("disabled"), stage="train", resume_step=10)
    for step in range(11, 16):
        second.log({"step": step, "loss": 0.5})
    second.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 16))
    assert [line["loss"] for line in lines] == [1.0] * 10 + [0.5] * 5


def test_offline_segments_hold_every_step_on_our_axis(tmp_path, config):
    for segment, steps in enumerate(([10, 20, 30], [20, 30, 40])):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        tracker = Tracker(folder, config("offline"), stage="train", resume_step=None)
        for step in steps:
            tracker.log({"step": step, "loss": 1.0 / step, "accuracy_at_position": [0.5, 0.25]})
        tracker.close()
        rows = offline_rows(folder, len(steps))
        (started,) = offline_records(folder, "run")
        assert (started.run_group, started.job_type) == ("run", "train")
        axes = {m.glob_name: m.step_metric for m in offline_records(folder, "metric")}
        assert axes["train/*"] == "train/step"
        assert [row["train/step"] for row in rows] == steps
        assert rows[0]["train/accuracy_at_position/2"] == 0.25
        ids = json.loads((folder / "wandb-train.json").read_text())["ids"]
        assert len(set(ids)) == segment + 1, "two segments with one id erase each other when synced"
        (folder / "wandb").rename(tmp_path / f"wandb-{segment}")


def test_evaluations_land_on_the_training_step_whenever_they_arrive(tmp_path, config):
    """What is logged offline is read back: the later checkpoint first, each in the run's group, tree beside chain."""
    settings = config("offline")
    for step, tau in ((40, 2.5), (20, 2.0)):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        rows = [{"dataset": "chat", "decoder": "dflash", "budget": None, "tau": tau},
                {"dataset": "chat", "decoder": "ddtree", "budget": 16, "tau": tau + 1}]  # fmt: skip
        log_results(
            folder, settings, {"mode": "replay", "checkpoint": {"step": step}, "rows": rows}
        )
        (history,) = offline_rows(folder, 1)
        assert history["eval/step"] == step
        assert history["eval/replay/chat/dflash"] == tau
        assert history["eval/replay/chat/ddtree-16"] == tau + 1
        (run,) = offline_records(folder, "run")
        assert (run.run_group, run.job_type, run.display_name) == ("run", "eval", "run-eval")
        axes = {m.glob_name: m.step_metric for m in offline_records(folder, "metric")}
        assert axes["eval/*"] == "eval/step"
        (folder / "wandb").rename(tmp_path / f"wandb-{step}")


def test_a_wandb_that_fails_does_not_stop_the_run(tmp_path, config, monkeypatch, capsys):
    import wandb

    def broken(**_: Any) -> None:
        raise RuntimeError("no service")

    monkeypatch.setattr(wandb, "init", broken)
    tracker = Tracker(tmp_path, config("online"), stage="train", resume_step=None)
    tracker.log({"step": 1, "loss": 2.0})
    tracker.close()
    assert "no service" in capsys.readouterr().err
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.0


def test_a_kill_while_the_record_is_cut_back_loses_nothing(tmp_path, config, monkeypatch):
    text = "".join(json.dumps({"step": step}) + "\n" for step in range(1, 13))
    (tmp_path / "metrics.jsonl").write_text(text)

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("configs.provenance.os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        Tracker(tmp_path, config("disabled"), stage="train", resume_step=10)
    assert (tmp_path / "metrics.jsonl").read_text() == text


class WandbServer(ThreadingHTTPServer):
    """Answers what wandb asks at the start of a run, as long as it lives, and keeps what was asked of which run."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = json.loads(raw) if self.path == "/graphql" else {}  # the others carry telemetry
        name = (asked.get("variables") or {}).get("name")
        if name and isinstance(self.server, WandbServer):
            self.server.asked.append((asked["operationName"], name))
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        bucket = {"id": "b", "name": name, "displayName": name, "project": project}
        data = {
            "upsertBucket": {"bucket": bucket, "inserted": True},
            "serverInfo": {"features": []},
        }
        body = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


RUN = """
import sys, time
from pathlib import Path
import train.tracking
from configs.load import load_config
train.tracking.START_SECONDS, train.tracking.FINISH_SECONDS = float(sys.argv[3]), 2.0
import wandb
began = time.monotonic()
tracker = train.tracking.Tracker(Path(sys.argv[2]), load_config(sys.argv[1]), stage="train", resume_step=None)
print(time.monotonic() - began, flush=True)
sys.stdin.readline()
began = time.monotonic()
for step in range(1, 200):
    tracker.log({"step": step, "loss": 1.0})
assert time.monotonic() - began < 5, "logging waits for the network"
tracker.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("network", ["none", "silent", "goes away", "offline"])
def test_a_dead_network_holds_nobody_up(tmp_path, tiny_target, network):
    """A real wandb whose server is not there (E3), accepts and never answers (E3), or goes away in the middle of the
    run; and one that is told to be offline, and may ask for nothing (E2)."""
    silent = socket.create_server(("127.0.0.1", 0))  # the kernel accepts, nobody reads
    server = WandbServer()
    port = {"none": 9, "goes away": server.server_port}.get(network, silent.getsockname()[1])
    mode = "offline" if network == "offline" else "online"
    file = write_config(tmp_path / "c.yaml", tiny_target, tracking={"wandb": mode})
    environment = {
        **os.environ,
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_MODE": mode,
    }
    limit = 60 if network in ("goes away", "offline") else 3
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(file), str(tmp_path), str(limit)],
        env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert run.stdin and run.stdout
    started = float(run.stdout.readline())
    server.shutdown()
    server.server_close()
    began = time.monotonic()
    _, said = run.communicate("\n", timeout=60)
    assert time.monotonic() - began < 20 and run.returncode == 0, said
    if network in ("none", "silent"):
        assert "did not start" in said and started < limit + 10
    elif network == "goes away":
        assert "warning: wandb" in said  # its service may also crash, as 0.31's has
        if "`wandb sync " in said:
            assert Path(said.split("`wandb sync ")[1].split("`")[0]).is_dir()
    else:
        assert "warning" not in said
        assert [row["train/step"] for row in offline_rows(tmp_path, 199)] == [*range(1, 200)]
    silent.settimeout(0)
    if network == "offline":
        with pytest.raises(BlockingIOError):  # nobody has knocked
            silent.accept()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 199


@pytest.mark.slow
def test_a_resumed_online_run_is_the_same_run(tmp_path, tiny_target):
    """One curve, whatever the number of resumes: the server is asked for the same id again."""
    server = WandbServer()
    file = write_config(tmp_path / "c.yaml", tiny_target, tracking={"wandb": "online"})
    environment = {
        **os.environ,
        "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_MODE": "online",
    }
    for first in ("UpsertBucket", "RunResumeStatus"):
        server.asked.clear()
        run = subprocess.run(
            [sys.executable, "-c", RUN, str(file), str(tmp_path), "60"],
            env=environment, text=True, input="\n", capture_output=True, timeout=120,
        )  # fmt: skip
        assert run.returncode == 0 and "did not start" not in run.stderr, run.stderr
        (kept,) = json.loads((tmp_path / "wandb-train.json").read_text())["ids"]
        assert server.asked[0] == (first, kept) and ("UpsertBucket", kept) in server.asked
    server.shutdown()
    server.server_close()
