"""The log survives kills and resumes; wandb gets the same on a step axis of its own, and never stops a run."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from tests.conftest import write_config
from train.tracking import Tracker


def offline_history(folder: Path) -> list[dict[str, Any]]:
    """History rows of an offline run: a .wandb file is a 7-byte header and then a LevelDB log of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, rows, at, whole = file.read_bytes(), [], 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            record, whole = Record.FromString(whole), b""
            if record.HasField("history"):
                rows.append(
                    {
                        "/".join(i.nested_key) or i.key: json.loads(i.value_json)
                        for i in record.history.item
                    }
                )
    return rows


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
        rows = offline_history(folder)
        for _ in range(100):  # wandb's service may still be writing on a busy machine
            if len(rows) == len(steps):
                break
            time.sleep(0.2)
            rows = offline_history(folder)
        assert [row["train/step"] for row in rows] == steps
        assert rows[0]["train/accuracy_at_position/2"] == 0.25
        ids = json.loads((folder / "wandb-train.json").read_text())["ids"]
        assert len(set(ids)) == segment + 1, "two segments with one id erase each other when synced"
        (folder / "wandb").rename(tmp_path / f"wandb-{segment}")


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
