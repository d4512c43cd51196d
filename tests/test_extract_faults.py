"""Extraction under attack: kills, full disks, damage, bad samples, any number of processes. Nothing may get lost.

Whatever happened before, the last run must leave the bytes of a run to which nothing happened.
"""

from __future__ import annotations

import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.load import UserError, load_config
from configs.provenance import FolderLock
from configs.schema import TargetConfig
from extract.head import FILE, TargetHead, save_head
from extract.main import processes_lock
from extract.manifest import read_manifest
from extract.plan import plan
from extract.prompts import MaskedSample
from extract.shards import ShardReader, verify
from extract.states import Computed, overlapped, write_states
from extract.target import Target, load_target
from tests.conftest import write_config
from tests.test_extract_shards import flip, manifest_of, run_in_fork
from tests.test_pipeline import ROOT, run

G = torch.Generator().manual_seed(0)
LENGTHS = [int(n) for n in torch.randint(2, 40, (24,), generator=G)]
SAMPLES = [
    MaskedSample.of(f"s{i}", torch.randint(4, 290, (n,), generator=G).tolist(), [0] + [1] * (n - 1))
    for i, n in enumerate(LENGTHS)
]
PLANS = plan(LENGTHS, shard_tokens=80, batch_tokens=100)
MANIFEST = manifest_of(
    (), complete=False, target_layer_ids=(1, 5), hidden_size=64, num_target_layers=6, vocab_size=320,
    storage_dtype="float32", target_dtype="float32", last_hidden=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    torch.set_num_threads(1)
    return load_target(TargetConfig(path=str(tiny_target), dtype="float32", device="cpu"))


def extract_as(folder: Path, target: Target, rank: int = 0, world: int = 1) -> None:
    """One process of the states stage, under its lock."""
    with processes_lock(folder, rank, world):
        write_states(folder, target, SAMPLES, PLANS, MANIFEST, rank=rank, world=world)


def extract_by(folder: Path, target: Target, world: int) -> None:
    """All processes of a run, one after the other: process 0 waits for the rest."""
    for rank in reversed(range(world)):
        extract_as(folder, target, rank, world)


def contents(folder: Path) -> dict[str, bytes]:
    left = [p for p in folder.iterdir() if not p.name.startswith(".lock-")]
    return {p.name: b"" if p.is_dir() else p.read_bytes() for p in left}


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    extract_as(folder, target)
    assert verify(folder) == [] and len(PLANS) >= 6
    return contents(folder)


# ---- processes


@pytest.mark.parametrize("world", [2, 3, 7, 40])
def test_any_number_of_processes_writes_the_same_bytes(target, whole, tmp_path, world):
    """40 is more than there are shards, so some processes have no samples at all."""
    extract_by(tmp_path, target, world)
    assert contents(tmp_path) == whole


def test_another_number_of_processes_finishes_what_one_began(target, whole, tmp_path):
    extract_as(tmp_path, target, 2, 3)
    extract_as(tmp_path, target, 1, 4)
    assert 0 < len(contents(tmp_path)) < len(whole)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("shard-*")}
    extract_by(tmp_path, target, 2)
    assert contents(tmp_path) == whole
    for name, changed in before.items():
        assert (tmp_path / name).stat().st_mtime_ns == changed, "a finished shard was redone"


def test_the_others_do_not_read_what_process_0_reads(target, whole, tmp_path, monkeypatch):
    extract_by(tmp_path, target, 3)
    read: list[str] = []
    real = Path.open

    def spy(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if path.name.startswith("shard-") and path.suffix == ".safetensors":
            read.append(path.name)
        return real(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", spy)
    extract_as(tmp_path, target, 1, 3)
    assert read == [p.name for p in PLANS[1::3]]
    read.clear()
    extract_as(tmp_path, target, 0, 3)
    assert sorted(read) == [p.name for p in PLANS]


@pytest.mark.slow
def test_sigkill_at_60_random_moments(target, whole, tmp_path):
    """Runs of 1 to 3 processes, killed together, up to four times in a folder before one may finish."""
    rng, started = random.Random(0), time.monotonic()
    assert run_in_fork(lambda: extract_as(tmp_path / "timed", target)) == 0
    duration = time.monotonic() - started
    kills = in_the_middle = 0
    for n in range(200):
        folder = tmp_path / f"{n}"
        for _ in range(rng.randint(1, 4)):
            children = fork_processes(folder, target, rng.randint(1, 3))
            time.sleep(rng.uniform(0, duration / 2))
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            ended = [os.waitpid(pid, 0)[1] for pid in children]
            kills += any(map(os.WIFSIGNALED, ended))
            left = contents(folder) if folder.exists() else {}
            in_the_middle += 0 < len(left) < len(whole)
            for name in left.keys() & whole.keys() - {"manifest.json"}:
                assert left[name] == whole[name], f"{name} is torn"
        extract_by(folder, target, rng.randint(1, 3))
        assert contents(folder) == whole, n
        shutil.rmtree(folder)
        if kills >= 60:
            break
    assert kills >= 60 and in_the_middle >= 20, (kills, in_the_middle)


def test_a_head_file_that_was_cut_off_leaves_nothing_behind(tmp_path):
    """safetensors writes to a file of a name of its own first, which a killed process cannot remove."""
    table = torch.zeros(1 << 24, 1)
    save = partial(save_head, TargetHead(table, table), tmp_path, torch.float32)
    cut_off = False
    while not cut_off:
        if (pid := os.fork()) == 0:
            try:
                save()
            finally:
                os._exit(0)
        ended = partial(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        while not any(tmp_path.rglob(".tmp*")) and not ended():
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        cut_off = not (tmp_path / FILE).exists()
        (tmp_path / FILE).unlink(missing_ok=True)
    assert list(tmp_path.iterdir())
    save()
    assert [p.name for p in tmp_path.iterdir()] == [FILE]


def fork_processes(folder: Path, target: Target, world: int) -> list[int]:
    children = []
    for rank in range(world):
        if (pid := os.fork()) == 0:
            try:
                extract_as(folder, target, rank, world)
            finally:
                os._exit(0)
        children.append(pid)
    return children


# ---- damage


def test_damaged_shards_are_redone_by_any_number_of_processes(target, whole, tmp_path):
    rng = random.Random(1)
    extract_as(tmp_path, target)
    shards = sorted(tmp_path.glob("shard-*.safetensors"))

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])

    def turn(path: Path) -> None:
        flip(path, rng.randrange(path.stat().st_size), 1 << rng.randrange(8))

    head = tmp_path / "target_head.safetensors"
    for world, damage in ((1, cut), (2, turn), (3, cut), (5, turn), (2, Path.unlink)):
        for path in [*rng.sample(shards, 2), head]:
            damage(path)
        assert len(verify(tmp_path)) == 3
        extract_by(tmp_path, target, world)
        assert contents(tmp_path) == whole


# ---- samples that must not be trained on


@contextmanager
def broken(target: Target, sample: int, value: float) -> Iterator[None]:
    """The states of tap 5 of one sample become NaN, Inf or zeros, wherever in a batch it lies."""
    ids = torch.tensor(SAMPLES[sample].input_ids)

    rows: list[int] = []  # where in the batch under way the sample lies

    def find(module: Any, args: Any, kwargs: Any) -> None:
        batch = enumerate(kwargs["input_ids"])
        rows[:] = [i for i, row in batch if torch.equal(row[: len(ids)], ids)]

    def block(module: Any, args: Any, out: Any) -> Any:
        states = (out if torch.is_tensor(out) else out[0]).clone()
        for row in rows:
            states[row, 1] = value
        return states if torch.is_tensor(out) else (states, *out[1:])

    handles = [
        target.decoder.register_forward_pre_hook(find, with_kwargs=True),
        target.layers[5].register_forward_hook(block),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("value", "reason"),
    [(float("nan"), "NaN or Inf"), (float("-inf"), "NaN or Inf"), (0.0, "only zeros")],
)
def test_a_bad_sample_is_left_out_by_name_and_tried_again(
    target, whole, tmp_path, capsys, value, reason, world
):
    bad = 9
    shard = next(p for p in PLANS if bad in p.samples)
    with broken(target, bad, value):
        extract_by(tmp_path, target, world)
        first = contents(tmp_path)
        reader = ShardReader(tmp_path, verify_checksums=True)
        assert reader.ids == [s.id for s in SAMPLES if s.id != "s9"]
        (left_out,) = reader.manifest.quarantined
        assert left_out.id == "s9"
        assert left_out.reason == f"hidden_states has {reason} in token 1, tap number 1"
        assert f"left out 's9': hidden_states has {reason}" in capsys.readouterr().err
        different = {name for name in whole if first[name] != whole[name]}
        assert different == {shard.name, shard.name.replace("safetensors", "json"), "manifest.json"}
        extract_by(tmp_path, target, 2)  # it is tried again, is bad again, and that is said again
        assert contents(tmp_path) == first and "left out 's9'" in capsys.readouterr().err
    extract_by(tmp_path, target, world)  # what made it bad has gone
    assert contents(tmp_path) == whole and read_manifest(tmp_path).quarantined == []


# ---- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    disk = tmp_path / "disk"
    disk.mkdir()

    def resize(kib: int) -> Path:
        option = f"{'remount,' if disk.is_mount() else ''}size={kib}k"
        mount = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(disk)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("may not mount; the file size limit covers the same path")
        return disk

    yield resize
    if disk.is_mount():
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_without_room_for_what_is_left_is_refused_before_the_first_forward(
    target, whole, small_disk, monkeypatch
):
    """All shards and the head are counted, by every process, not its own share alone."""
    size = sum(map(len, whole.values()))
    folder = small_disk(size * 2 // 3 // 1024)
    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward_taps", lambda *_: pytest.fail("a forward"))
        for rank in range(3):
            with pytest.raises(UserError, match=r"more tokens of states needs .* free; make room"):
                extract_as(folder, target, rank, 3)
    small_disk(size * 2 // 1024)
    extract_as(folder, target)
    assert contents(folder) == whole


def test_a_disk_that_fills_up_on_the_way(target, whole, small_disk, monkeypatch):
    """Others write too, so the check at the start is no promise. Every size, hence every kind of file, in turn."""
    monkeypatch.setattr("extract.states.free_space_check", lambda *_: None)
    size = sum(map(len, whole.values())) // 1024
    failures: list[str] = []
    folder = small_disk(8)
    for kib in range(8, size + 120, size // 12):
        small_disk(kib)
        try:
            extract_as(folder, target)
        except OSError as error:
            assert error.strerror == "No space left on device"
            failures.append(Path(error.filename or "?").name)
        except UserError as error:
            failures.append("lock")
            assert "No space left on device" in str(error)
        for path in folder.glob("shard-*"):
            assert path.read_bytes() == whole[path.name], "half-written"
        if folder.joinpath("manifest.json").exists():
            complete = read_manifest(folder, incomplete_ok=True).complete
            assert complete == (contents(folder) == whole)
    assert {n.split("-")[0] for n in failures} >= {"shard", "target_head.safetensors"}, failures
    extract_as(folder, target)
    assert contents(folder) == whole


def test_a_file_size_limit_stops_with_the_name_of_the_file(target, whole, tmp_path):
    """RLIMIT_FSIZE makes writes fail for whoever runs this: at the head, which is larger, then at the shards."""
    largest = max(len(data) for name, data in whole.items() if name.startswith("shard-"))
    assert largest < len(whole["target_head.safetensors"])
    for limit, name in ((largest + 100, "target_head."), (largest - 1000, "shard-")):

        def limited(limit: int = limit, name: str = name) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            with pytest.raises(OSError, match="File too large") as caught:
                extract_as(tmp_path, target)
            assert Path(caught.value.filename).name.startswith(name), caught.value.filename

        assert run_in_fork(limited) == 0
        manifest = tmp_path / "manifest.json"
        assert not manifest.exists() or not read_manifest(tmp_path, incomplete_ok=True).complete
        extract_as(tmp_path, target)
        assert contents(tmp_path) == whole
        for shard in tmp_path.glob("shard-*.safetensors"):
            shard.unlink()


def test_the_next_shard_is_computed_while_one_is_written_and_at_most_two_are_in_memory():
    plans, events, gate = plan([4] * 6, shard_tokens=4, batch_tokens=4), [], threading.Event()

    def compute(shard):
        events.append(f"compute {shard.index}")
        if shard.index == 1:
            gate.set()  # shard 0 is being written until now
        return Computed([])

    def write(shard, computed):
        assert gate.wait(20), "shard 1 was not computed while 0 was being written"
        events.append(f"write {shard.index}")
        if shard.index == 4:
            raise OSError(28, "No space left on device")
        return shard.index

    seen: list[Any] = []
    with pytest.raises(OSError, match="No space left"):
        seen.extend(overlapped(plans, compute, write))
    assert [entry for _, entry in seen] == [p.index for p, _ in seen] == [0, 1, 2, 3]
    for k in range(2, 6):  # a shard is computed only when the last but one is on the disk
        assert events.index(f"write {k - 2}") < events.index(f"compute {k}")
    assert "write 5" not in events


# ---- two runs, one folder


def test_no_shard_has_two_owners(tmp_path):
    """The same share and any other number of processes are refused; the other shares of the same run are not."""
    with processes_lock(tmp_path, 1, 3), processes_lock(tmp_path, 0, 3):
        for rank, world in ((0, 3), (1, 3), (0, 1), (1, 2), (3, 4), (2, 13)):
            with (
                pytest.raises(UserError, match=rf"another extract-.*\(pid {os.getpid()}\)"),
                processes_lock(tmp_path, rank, world),
            ):
                pass
        with processes_lock(tmp_path, 2, 3):
            pass
    with processes_lock(tmp_path, 0, 1):
        pass
    (tmp_path / ".lock-extract-0").touch()  # of an older version; nobody holds it
    handle = os.open(tmp_path / ".lock-extract-0-of-1", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)  # another process that looks, as this one does
    with processes_lock(tmp_path, 0, 2), processes_lock(tmp_path, 1, 2):
        pass
    os.close(handle)


def test_a_killed_owner_blocks_nobody(target, whole, tmp_path):
    reader, writer = os.pipe()

    def hold() -> None:
        with processes_lock(tmp_path, 1, 2):
            os.write(writer, b"x")
            time.sleep(60)

    if (pid := os.fork()) == 0:
        try:
            hold()
        finally:
            os._exit(0)
    os.read(reader, 1)
    with pytest.raises(UserError, match=rf"\(pid {pid}\) is working"):
        extract_as(tmp_path, target)
    assert contents(tmp_path) == {}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    extract_as(tmp_path, target)
    assert contents(tmp_path) == whole


# ---- the command


@pytest.fixture(scope="module")
def extracted(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_config(tmp_path_factory.mktemp("command") / "config.yaml", tiny_target)
    run("extract/main.py", "--config", str(config))
    return config


POISON = """
import runpy, sys
import torch
import extract.states
forward = extract.states.forward_shard
def poisoned(*args):
    computed = forward(*args)
    for sample in computed.samples:
        if sample.id.startswith("q3"):
            sample.hidden_states[2, 70] = float("nan")
    return computed
extract.states.forward_shard = poisoned
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path("extract/main.py", run_name="__main__")
"""


@pytest.mark.slow
def test_the_command_names_a_bad_sample_and_ends_with_1(extracted, tiny_target, tmp_path):
    config = write_config(tmp_path / "config.yaml", tiny_target)
    poison = tmp_path / "poison.py"
    poison.write_text(POISON)
    command = [str(poison), "extract/main.py", "--config", str(config)]
    for _ in range(2):  # the rerun does not call it complete either
        out = run(*command, status=1, PYTHONPATH=str(ROOT))
        (sentence,) = [line for line in out.splitlines() if line.startswith("error: ")]
        assert "error: 1 of 8 samples are left out of" in sentence and "'q3" in sentence
        assert "NaN or Inf in token 2, tap number 1" in sentence
        assert sentence.endswith(f"accelerate launch train/main.py --config {config}")
    assert "'q3" in run("extract/main.py", "--config", str(config), "--verify", status=1)
    every = tmp_path / "every.py"
    every.write_text(POISON.replace('if sample.id.startswith("q3")', "if True"))
    other = [*command[1:], "--set", f"run_dir={tmp_path / 'none'}"]
    assert "8 of 8 samples are left out" in run(str(every), *other, status=1, PYTHONPATH=str(ROOT))
    refused = run("train/main.py", *other[1:], status=2)
    assert "has no samples: all 8 were left out, see manifest.json" in refused
    run("train/main.py", "--config", str(config), "--set", "train.max_steps=1")  # one may go on
    run("extract/main.py", "--config", str(config))  # the fault has gone
    run("extract/main.py", "--config", str(config), "--verify")
    mine, theirs = (Path(load_config(c).run_dir) / "states" for c in (config, extracted))
    assert contents(mine) == contents(theirs)


@pytest.mark.slow
def test_the_command_on_a_full_disk_is_one_sentence_and_goes_on_later(
    extracted, tiny_target, tmp_path, small_disk
):
    config = write_config(tmp_path / "config.yaml", tiny_target)
    states = Path(load_config(extracted).run_dir) / "states"
    override = ("--set", f"run_dir={small_disk(400)}/run")
    out = run("extract/main.py", "--config", str(config), *override, status=2)
    assert len([line for line in out.splitlines() if line.startswith("error: ")]) == 1
    # the same with a file size limit, which bash sets and python inherits
    limited = subprocess.run(
        ["bash", "-c", 'ulimit -f 60; exec "$@"', "-", sys.executable, "extract/main.py",
         "--config", str(config), "--set", f"run_dir={tmp_path / 'limited'}"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert limited.returncode == 2 and "Traceback" not in limited.stderr, limited.stderr
    assert "error: File too large while writing" in limited.stderr and "ulimit" in limited.stderr
    run_dir = small_disk(8000) / "run"
    run("extract/main.py", "--config", str(config), *override)
    run("extract/main.py", "--config", str(config), "--set", f"run_dir={tmp_path / 'limited'}")
    assert contents(run_dir / "states") == contents(states)
    assert contents(tmp_path / "limited" / "states") == contents(states)


@pytest.mark.slow
def test_a_second_command_is_refused_and_leaves_the_record_alone(extracted, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(load_config(extracted).run_dir, run_dir)
    before = (run_dir / "config.yaml").read_bytes(), (run_dir / "provenance.json").read_bytes()
    override = ("--set", f"run_dir={run_dir}", "--set", "seed=7")
    with FolderLock(run_dir, "extract-0-of-1"):
        out = run("extract/main.py", "--config", str(extracted), *override, status=2)
    assert f"(pid {os.getpid()}) is working in {run_dir}" in out
    after = (run_dir / "config.yaml").read_bytes(), (run_dir / "provenance.json").read_bytes()
    assert after == before
