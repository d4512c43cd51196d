"""The watcher: every finished checkpoint once, the newest first, whoever is killed on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from configs.load import UserError, load_config
from configs.provenance import FolderLock, lock_owner
from eval.done import lock_name
from launch.watch import Watcher, cpu_set, training_is_complete
from tests.conftest import write_config
from train.finished import complete_checkpoints

ROOT = Path(__file__).resolve().parent.parent

# Stands in for eval/main.py where only the watcher is looked at: it appends to a log, and writes what `due` looks for.
STAND_IN = """
import hashlib, json, sys, time
from pathlib import Path
run_dir, settings, checkpoint = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
with (run_dir / "log").open("a") as log:
    log.write(checkpoint.name + "\\n")
time.sleep(0.05)
if checkpoint.name == "step-000003":
    sys.exit(2)
weights = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()[:16]
out = run_dir / "evals" / checkpoint.name
out.mkdir(parents=True)
(out / "results.json").write_text(json.dumps({
    "schema": 1, "mode": "replay", "rows": [], "target": {}, "provenance": {}, "settings": settings,
    "checkpoint": {"path": "", "step": 1, "fingerprint": weights}}))
(out / "report.md").touch()
"""


def add_checkpoint(run_dir: Path, step: int, *, total: int = 1_000_000, done: bool = True) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    (folder / "resume").mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights of {step}")
    (folder / "resume" / "trainer.json").write_text(json.dumps({"total_steps": total}))
    if done:
        (folder / "DONE").touch()
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_config(tmp_path / "config.yaml", tmp_path)
    return tmp_path / "run"


def watcher(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Watcher:
    monkeypatch.setattr("launch.watch.POLL_SECONDS", 0.02)
    monkeypatch.setattr(Watcher, "_settings_now", lambda _: "as they are")
    command = [sys.executable, "-c", STAND_IN, str(run_dir), "as they are"]
    return Watcher(load_config(run_dir.parent / "config.yaml"), "replay", command, os.environ)


def evaluations(run_dir: Path) -> list[str]:
    return (run_dir / "log").read_text().split()


def test_two_watchers_evaluate_each_finished_checkpoint_once_and_end(run_dir, monkeypatch, capsys):
    for step in (1, 2, 999_999):
        add_checkpoint(run_dir, step)
    half = add_checkpoint(run_dir, 500_000, done=False)
    watchers = [watcher(run_dir, monkeypatch) for _ in range(2)]
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda w=w: statuses.append(w.watch())) for w in watchers]
    for thread in threads:
        thread.daemon = True
        thread.start()
    deadline = time.monotonic() + 60
    while not (run_dir / "log").exists() or len(evaluations(run_dir)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert evaluations(run_dir)[-1] in ("step-000001", "step-000002")
    add_checkpoint(run_dir, 1_000_000)  # sorts before step-999999 as text
    for thread in threads:
        thread.join(timeout=60)
    assert statuses == [0, 0]
    names = evaluations(run_dir)
    assert sorted(names) == ["step-000001", "step-000002", "step-1000000", "step-999999"]
    assert "step-999999" in names[:2] and half.name not in names
    assert capsys.readouterr().out.count("all 4 checkpoints have replay results") == 2


def test_what_cannot_be_evaluated_is_tried_twice_and_named(run_dir, monkeypatch, capsys):
    for step in (2, 3, 4):
        add_checkpoint(run_dir, step, total=4)
    assert watcher(run_dir, monkeypatch).watch() == 1
    assert evaluations(run_dir) == ["step-000004", "step-000003", "step-000003", "step-000002"]
    assert "not evaluated, see above: step-000003" in capsys.readouterr().out


def test_a_pruned_checkpoint_is_no_failure(run_dir, monkeypatch, capsys):
    gone = add_checkpoint(run_dir, 3, total=9)
    ours = watcher(run_dir, monkeypatch)
    real = ours._run

    def run_and_prune(command):
        status = real(command)
        shutil.rmtree(gone)
        return status

    monkeypatch.setattr(ours, "_run", run_and_prune)
    assert ours.watch(once=True) == 0
    assert "step-000003 is gone" in capsys.readouterr().out


def test_a_checkpoint_in_other_hands_is_left_to_them(run_dir, monkeypatch, capsys):
    folder = add_checkpoint(run_dir, 4, total=4)
    with FolderLock(run_dir, lock_name(folder, "replay")):
        assert watcher(run_dir, monkeypatch).watch(once=True) == 0
    assert "left to other processes: step-000004" in capsys.readouterr().out
    assert not (run_dir / "log").exists()


def test_training_is_complete_when_its_last_checkpoint_says_so(run_dir):
    assert not training_is_complete(run_dir)
    add_checkpoint(run_dir, 2, total=4)
    assert not training_is_complete(run_dir)
    add_checkpoint(run_dir, 4, total=4, done=False)
    assert not training_is_complete(run_dir)
    (run_dir / "checkpoints" / "step-000004" / "DONE").touch()
    assert training_is_complete(run_dir)


def test_cores_are_a_list_of_ranges():
    assert cpu_set("0-3,8") == {0, 1, 2, 3, 8}
    with pytest.raises(UserError, match="write it as 0-3"):
        cpu_set("all")


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "launch/main.py", *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_watcher_that_is_killed_in_an_evaluation_leaves_nothing_and_others_finish(
    tiny_target, tmp_path
):
    config = write_config(
        tmp_path / "config.yaml",
        tiny_target,
        train={"max_steps": 2, "epochs": 9, "checkpoint_every": 1, "max_length": 48},
    )
    run_dir, name = tmp_path / "run", lock_name(Path("step-000002"), "replay")
    watch = ("watch", "--config", str(config))

    first = start(*watch)  # from before the first stage
    out = start("run", "--config", str(config), "--until", "train").communicate(timeout=600)[0]
    assert "=== done: extract" in out and "Traceback" not in out, out
    while not lock_owner(run_dir, name):  # eval/main.py itself has it, not the watcher
        assert first.poll() is None
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    # Step 1 may have had its turn before step 2 was there; of step 2 there is nothing, or all.
    left = [p.name for p in run_dir.glob("evals/step-000002/*")]
    assert left == [] or "results.json" in left

    outs = [process.communicate(timeout=600)[0] for process in [start(*watch), start(*watch)]]
    whole = "".join(outs)
    assert "Traceback" not in whole, whole
    assert whole.count("all 2 checkpoints have replay results") == 2, whole
    assert len(complete_checkpoints(run_dir)) == 2
    for step in (1, 2):
        assert len(re.findall(f"evaluating step-00000{step};", whole)) <= 1
        results = json.loads((run_dir / f"evals/step-00000{step}/results.json").read_text())
        assert results["checkpoint"]["step"] == step and results["rows"]
        assert (run_dir / f"evals/step-00000{step}/report.md").exists()
