"""States on disk: the plan, bits through a round trip, kills and full disks, and every kind of damage."""

import errno
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import extract.plan
import extract.shards
from configs.load import UserError
from configs.provenance import file_sha256
from extract.manifest import (
    SCHEMA,
    Answers,
    Manifest,
    ShardEntry,
    TargetHead,
    TargetInfo,
    Totals,
    read_manifest,
    require,
    write_manifest,
)
from extract.shards import (
    Sample,
    ShardPlan,
    ShardReader,
    estimate_bytes,
    owned,
    plan,
    shard_done,
    verify,
    write_shard,
)

torch.set_num_threads(1)

TAPS, HIDDEN, PLAN = 2, 8, "plan-1"
few = settings(max_examples=80, deadline=None)


def make_sample(
    name: str,
    tokens: int,
    *,
    hidden: int = HIDDEN,
    last: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Sample:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {tokens}".encode()))
    states = torch.randn(tokens, (TAPS + last) * hidden, generator=generator).to(dtype)
    ids = torch.randint(0, 300, (tokens,), generator=generator, dtype=torch.int32)
    mask = (torch.arange(tokens) >= tokens // 2).to(torch.uint8)
    width = TAPS * hidden
    return Sample(name, ids, mask, states[:, :width], states[:, width:] if last else None)


def make_samples(lengths: Sequence[int], **options: Any) -> list[Sample]:
    return [make_sample(f"chat-{i}", length, **options) for i, length in enumerate(lengths)]


LENGTHS = [3, 7, 1, 5, 12, 2, 4]  # with shard_tokens=10: four shards
SAMPLES = make_samples(LENGTHS)
PLANS = plan(LENGTHS, shard_tokens=10, batch_tokens=10)


def write_one(
    folder: Path, shard: ShardPlan, samples: Sequence[Sample], **options: Any
) -> ShardEntry:
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"num_taps": TAPS, "storage_dtype": torch.bfloat16}
    mine = [samples[i] for i in shard.samples]
    return write_shard(folder, shard, mine, **(settings | {"plan_fingerprint": PLAN} | options))


def manifest_of(entries: Sequence[ShardEntry], **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "complete": True,
        "target": TargetInfo(id="toy", revision=None, fingerprint="f00d"),
        "tokenizer_hash": "a",
        "template_hash": "b",
        "enable_thinking": None,
        "target_layer_ids": (1, 8),
        "hidden_size": HIDDEN,
        "num_target_layers": 12,
        "vocab_size": 300,
        "storage_dtype": "bfloat16",
        "target_dtype": "bfloat16",
        "mask_token_id": 299,
        "answers": Answers(source="regenerated", greedy=True, max_new_tokens=8, temperature=0.0),
        "last_hidden": False,
        "data_fingerprint": "d",
        "plan_fingerprint": PLAN,
        "target_head": None,
        "shards": tuple(entries),
        "totals": Totals.of(entries),
    }
    return Manifest(**(values | changes))


def store(
    folder: Path,
    samples: Sequence[Sample] = SAMPLES,
    plans: Sequence[ShardPlan] = PLANS,
    **changes: Any,
) -> Path:
    """Write a complete states folder."""
    folder.mkdir(exist_ok=True)
    write_manifest(folder, manifest_of([write_one(folder, p, samples) for p in plans], **changes))
    return folder


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def states(tmp_path: Path, pristine: Path) -> Path:
    """A complete states folder that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "states"))


def bits(tensor: Tensor | None) -> list[Any] | None:
    if tensor is None:
        return None
    return [tensor.dtype, tensor.shape, tensor.contiguous().view(torch.uint8).tolist()]


def assert_same(found: Sample, wanted: Sample) -> None:
    assert found.id == wanted.id
    for name in ("input_ids", "loss_mask", "hidden_states", "last_hidden"):
        assert bits(getattr(found, name)) == bits(getattr(wanted, name)), name


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_in_fork(work: Callable[[], object], kill_after: float | None = None) -> int:
    """Run work in a process of its own; the exit code, -9 if it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def flip(path: Path, byte: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= mask
    path.write_bytes(data)


# ---- the plan


@few
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 60), st.integers(1, 60))
def test_plan(lengths: list[int], shard_tokens: int, batch_tokens: int) -> None:
    plans = plan(lengths, shard_tokens=shard_tokens, batch_tokens=batch_tokens)
    assert [i for p in plans for i in p.samples] == list(range(len(lengths)))
    assert [p.index for p in plans] == list(range(len(plans)))
    sizes = [sum(lengths[i] for i in p.samples) for p in plans]
    for k, p in enumerate(plans):
        assert sizes[k] <= shard_tokens or len(p.samples) == 1
        if k + 1 < len(plans):  # closed only because the next one did not fit
            assert sizes[k] + lengths[plans[k + 1].samples[0]] > shard_tokens
        assert sorted(i for batch in p.batches for i in batch) == list(p.samples)
        longest = [max(lengths[i] for i in batch) for batch in p.batches]
        for batch, width in zip(p.batches, longest, strict=True):
            assert len(batch) * width <= batch_tokens or len(batch) == 1
        for width, one, two in zip(longest, p.batches, p.batches[1:], strict=False):
            assert min(lengths[i] for i in one) >= max(lengths[i] for i in two)  # by length
            assert (len(one) + 1) * width > batch_tokens  # and full
    for world in (1, 2, 3, 5):
        dealt = [p for rank in range(world) for p in owned(plans, rank, world)]
        assert sorted(dealt, key=lambda p: p.index) == plans


def test_plan_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan([], shard_tokens=4, batch_tokens=4) == []
    three = plan([1, 1, 1], shard_tokens=1, batch_tokens=4)
    assert [len(owned(three, rank, 4)) for rank in range(4)] == [1, 1, 1, 0]
    assert three[2].name == "shard-000002.safetensors"
    with pytest.raises(ValueError, match="at least one token"):
        plan([3, 0], shard_tokens=4, batch_tokens=4)
    monkeypatch.setattr(extract.plan, "MAX_SHARD_SAMPLES", 2)
    assert [p.samples for p in plan([1] * 5, shard_tokens=99, batch_tokens=9)] == [
        (0, 1),
        (2, 3),
        (4,),
    ]
    monkeypatch.setattr(extract.plan, "MAX_SHARDS", 2)
    with pytest.raises(UserError, match=r"extract.shard_tokens=99 makes 3 shards"):
        plan([1] * 5, shard_tokens=99, batch_tokens=9)


# ---- round trip


def test_every_finite_bf16_pattern_survives(tmp_path: Path) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    states = every[every.isfinite()].reshape(-1, TAPS * 8)  # 3e38, 1e-40 and -0.0 among them
    mask = torch.ones(len(states), dtype=torch.uint8)
    sample = Sample("all", torch.arange(len(states), dtype=torch.int32), mask, states, None)
    one = plan([len(states)], shard_tokens=1, batch_tokens=1)
    store(tmp_path, [sample], one)
    assert_same(ShardReader(tmp_path)[0], sample)
    assert verify(tmp_path) == []


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_round_trip(tmp_path: Path, dtype: str, last: bool) -> None:
    kind = getattr(torch, dtype)
    samples = make_samples(LENGTHS, last=last, dtype=kind)
    entries = [write_one(tmp_path, p, samples, storage_dtype=kind) for p in PLANS]
    write_manifest(tmp_path, manifest_of(entries, storage_dtype=dtype, last_hidden=last))
    reader = ShardReader(tmp_path, verify_checksums=True)
    assert len(reader) == len(samples) == reader.manifest.totals.samples
    assert reader.lengths == LENGTHS
    assert reader.supervised == [int(s.loss_mask.sum()) for s in samples]
    assert reader.ids == [s.id for s in samples]
    for i in random.Random(0).sample(range(len(samples)), len(samples)):
        assert_same(reader[i], samples[i])
    in_files = [s for k in range(len(PLANS)) for s in reader.iter_shard(k)]
    for found, wanted in zip(in_files, samples, strict=True):
        assert_same(found, wanted)
    assert_same(reader[-1], samples[-1])
    for outside in (len(samples), -len(samples) - 1):
        with pytest.raises(IndexError):
            reader[outside]
    assert verify(tmp_path) == []


def test_casts_once_and_estimates_the_size(tmp_path: Path) -> None:
    sample = make_sample("a", 50)
    wide = replace(sample, hidden_states=torch.randn(50, TAPS * HIDDEN))
    one = plan([50], shard_tokens=50, batch_tokens=50)
    store(tmp_path, [wide], one)
    found = ShardReader(tmp_path)[0].hidden_states
    assert bits(found) == bits(wide.hidden_states.bfloat16())
    header = struct.unpack("<Q", (tmp_path / one[0].name).read_bytes()[:8])[0]
    size = (tmp_path / one[0].name).stat().st_size - 8 - header - 16  # 16: two offsets
    assert estimate_bytes(50, TAPS, HIDDEN, torch.bfloat16, False) == size
    with_last = estimate_bytes(50, TAPS, HIDDEN, torch.float32, True)
    assert with_last == 50 * ((TAPS + 1) * HIDDEN * 4 + 5)


def test_other_programs_can_read_a_shard_and_its_header_stays_small(tmp_path: Path) -> None:
    lengths = [2] * 3000
    samples, one = make_samples(lengths), plan(lengths, shard_tokens=10**9, batch_tokens=64)
    entry = write_one(tmp_path, one[0], samples)
    path = tmp_path / entry.file
    tensors = load_file(path)
    assert set(tensors) == {"offsets", "input_ids", "hidden_states", "loss_mask"}
    assert tensors["offsets"].tolist() == list(range(0, 6001, 2))
    assert torch.equal(tensors["hidden_states"], torch.cat([s.hidden_states for s in samples]))
    assert struct.unpack("<Q", path.read_bytes()[:8])[0] < 30 * len(samples) + 1000
    sidecar = json.loads((tmp_path / "shard-000000.json").read_text())
    assert sidecar == entry.model_dump(mode="json")
    assert entry.sha256 == file_sha256(path)
    assert (entry.samples, entry.tokens, entry.supervised_tokens) == (3000, 6000, 3000)


# ---- what must never reach training


def altered(name: str, row: Any, value: float, **options: Any) -> Sample:
    sample = make_sample("chat-1", 7, last=name == "last_hidden", **options)
    tensor = getattr(sample, name).clone()
    tensor[row] = value
    return replace(sample, **{name: tensor})


GOOD = make_sample("chat-1", 7)
WIDE = replace(GOOD, hidden_states=GOOD.hidden_states.float())
DEFECTS = {
    "nan": (altered("hidden_states", (4, 9), float("nan")), "NaN or Inf in token 4, tap number 1"),
    "inf": (altered("hidden_states", (6, 0), -float("inf")), "NaN or Inf in token 6, tap number 0"),
    "zeros": (altered("hidden_states", (2, slice(8, 16)), -0.0), "only zeros in token 2, tap number 1"),
    "last nan": (altered("last_hidden", (0, 0), float("nan")), "last_hidden has NaN"),
    "last zeros": (altered("last_hidden", 3, 0.0), "last_hidden has only zeros in token 3"),
    "one-row gap": (replace(GOOD, hidden_states=GOOD.hidden_states[:-1]), r"\[6, 16\] and 7 tokens need \[7, 16\]"),
    "mask gap": (replace(GOOD, loss_mask=GOOD.loss_mask[1:]), r"loss_mask has shape \[6\] and 7 tokens"),
    "no answer": (altered("loss_mask", slice(None), 0), "loss_mask must be"),
    "mask of 2": (altered("loss_mask", 0, 2), "loss_mask must be"),
    "empty": (make_sample("chat-1", 0), "no tokens"),
    "overflow": (replace(WIDE, hidden_states=WIDE.hidden_states * 0 + 3.4e38), "as bfloat16, .* NaN or Inf"),
    "underflow": (replace(WIDE, hidden_states=WIDE.hidden_states * 0 + 1e-44), "as bfloat16, .* only zeros"),
}  # fmt: skip


@pytest.mark.parametrize("case", DEFECTS)
def test_a_defect_leaves_its_sample_out_and_names_it(tmp_path: Path, case: str) -> None:
    sample, message = DEFECTS[case]
    good = make_sample("chat-0", 5, last=sample.last_hidden is not None)
    shard = ShardPlan(0, (0, 1), ((0, 1),))
    entry = write_one(tmp_path, shard, [good, sample])
    assert [(q.id, bool(re.search(message, q.reason))) for q in entry.quarantined] == [
        ("chat-1", True)
    ], entry.quarantined
    alone = write_one(tmp_path / "alone", ShardPlan(0, (0,), ((0,),)), [good])
    assert (entry.samples, entry.tokens, entry.sha256) == (1, 5, alone.sha256)
    assert shard_done(tmp_path, shard, PLAN) == entry
    write_manifest(tmp_path, manifest_of([entry], last_hidden=good.last_hidden is not None))
    assert verify(tmp_path) == []
    assert read_manifest(tmp_path).quarantined == list(entry.quarantined)


@pytest.mark.parametrize("bad", [{0}, {2}, {6}, {2, 3}, {0, 1, 2, 3, 4, 5, 6}], ids=str)
def test_a_shard_may_be_left_without_samples(tmp_path: Path, bad: set[int]) -> None:
    """[3, 7], [1, 5], [12], [2, 4]: the second shard loses one sample or both, or nothing is left anywhere."""
    samples = [
        replace(s, hidden_states=s.hidden_states * float("nan")) if i in bad else s
        for i, s in enumerate(SAMPLES)
    ]
    store(tmp_path, samples)
    reader = ShardReader(tmp_path, verify_checksums=True)
    kept = [s for i, s in enumerate(SAMPLES) if i not in bad]
    assert len(reader) == len(kept)
    for i, wanted in enumerate(kept):
        assert_same(reader[i], wanted)
    assert [s.id for k in range(len(PLANS)) for s in reader.iter_shard(k)] == [s.id for s in kept]
    assert [q.id for q in reader.manifest.quarantined] == [SAMPLES[i].id for i in sorted(bad)]
    assert verify(tmp_path) == []


def test_last_hidden_is_all_or_nothing(tmp_path: Path) -> None:
    mixed = [make_sample("with", 3, last=True), make_sample("without", 3)]
    for samples, name in ((mixed, "without"), (mixed[::-1], "with")):
        (left_out,) = write_one(tmp_path, ShardPlan(0, (0, 1), ((0, 1),)), samples).quarantined
        assert left_out.id == name and left_out.reason.startswith("last_hidden has shape")


# ---- kills and full disks

BIG_LENGTHS = [40, 200, 20, 350, 40, 200]
BIG = make_samples(BIG_LENGTHS, hidden=256)  # about 1 KiB a token
BIG_PLANS = plan(BIG_LENGTHS, shard_tokens=400, batch_tokens=400)


def extract_all(folder: Path, plans: Sequence[ShardPlan] = BIG_PLANS) -> None:
    """What extraction does on every start: keep what is done, redo the rest."""
    for shard in plans:
        if shard_done(folder, shard, PLAN) is None:
            write_one(folder, shard, BIG)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("reference")
    extract_all(folder)
    return contents(folder)


def assert_survived(
    folder: Path, reference: dict[str, bytes], plans: Sequence[ShardPlan] = BIG_PLANS
) -> int:
    """Nothing that counts is torn, and a second start ends as if nothing had happened."""
    left = contents(folder)
    done = [p for p in plans if shard_done(folder, p, PLAN)]
    for name in [p.name for p in done] + [n for n in left if n.startswith("shard-")]:
        assert left[name] == reference[name], name
    extract_all(folder, plans)
    stems = {p.name.partition(".")[0] for p in plans}
    assert contents(folder) == {n: b for n, b in reference.items() if n.partition(".")[0] in stems}
    return len(done)


@pytest.mark.slow
def test_sigkill_at_random_moments(tmp_path: Path, reference: dict[str, bytes]) -> None:
    durations = []
    for attempt in range(
        3
    ):  # the shortest: on a busy machine a long one would let nearly all others end
        start = time.monotonic()
        assert run_in_fork(partial(extract_all, tmp_path / f"whole-{attempt}")) == 0
        durations.append(time.monotonic() - start)
    duration, killed, rng = min(durations), 0, random.Random(0)
    for attempt in range(60):
        folder = tmp_path / f"{attempt}"
        folder.mkdir()
        code = run_in_fork(partial(extract_all, folder), rng.uniform(0, duration))
        killed += code == -signal.SIGKILL
        assert_survived(folder, reference)
        if killed == 16:
            return
    raise AssertionError(f"only {killed} of 60 processes were still writing when they were killed")


def test_sigkill_before_every_step(tmp_path: Path, reference: dict[str, bytes]) -> None:
    """Kill before each flush, rename and piece of data, one step a process."""
    plans = BIG_PLANS[1:]

    def dies_at(step: int, folder: Path) -> None:
        steps = 0

        def stepping(function: Callable) -> Callable:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                nonlocal steps
                if steps == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                steps += 1
                return function(*arguments, **options)

            return wrapped

        for owner, name in ((os, "fsync"), (Path, "replace"), (extract.shards, "_bytes")):
            setattr(owner, name, stepping(getattr(owner, name)))
        extract_all(folder, plans)

    done_after: list[int] = []
    code = -1
    while code != 0:
        folder = tmp_path / f"{len(done_after)}"
        folder.mkdir()
        code = run_in_fork(partial(dies_at, len(done_after), folder))
        assert code in (0, -signal.SIGKILL)
        done_after.append(assert_survived(folder, reference, plans))
    assert len(done_after) > 15
    assert done_after == sorted(done_after)
    assert set(done_after) == {0, 1, 2}


def test_the_sidecar_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut may leave depends on this order; no kill can show it."""
    events: list[str] = []
    real = Path.replace

    def replace_(source: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return real(source, target)

    monkeypatch.setattr(Path, "replace", replace_)
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: events.append(f"flush {Path(f'/proc/self/fd/{handle}').readlink().name}"),
    )
    write_one(tmp_path, PLANS[0], SAMPLES)
    events = [event for event in events if ".json.tmp" not in event]
    assert events == [
        "flush .shard-000000.safetensors.tmp",
        "rename to shard-000000.safetensors",
        "rename to shard-000000.json",
        f"flush {tmp_path.name}",
    ]


@pytest.mark.parametrize("call", range(9))
def test_enospc_at_every_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes], call: int
) -> None:
    """Each shard flushes itself, its sidecar and the folder; the third of each kind fails in turn."""
    real, calls = os.fsync, 0

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left") as caught:
        extract_all(tmp_path)
    assert str(tmp_path) in caught.value.filename or call % 3 == 2
    left = contents(tmp_path)
    assert len(left) == 2 * (call // 3)  # finished ones, and nothing of the one that failed
    assert all(left[name] == reference[name] for name in left)
    monkeypatch.undo()
    extract_all(tmp_path)
    assert contents(tmp_path) == reference


def test_a_file_size_limit_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The kernel itself refuses in the middle of the second shard, whoever runs this test."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300 * 1024, 300 * 1024))
        with pytest.raises(OSError, match="File too large") as caught:
            extract_all(tmp_path)
        assert caught.value.filename == str(tmp_path / BIG_PLANS[1].name)

    assert run_in_fork(limited) == 0
    assert sorted(contents(tmp_path)) == ["shard-000000.json", "shard-000000.safetensors"]
    assert shard_done(tmp_path, BIG_PLANS[0], PLAN) is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount; the file size limit above covers the same path")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk: Path, reference: dict[str, bytes]) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        extract_all(small_disk)
    assert caught.value.filename == str(small_disk / BIG_PLANS[2].name)
    assert len([p for p in BIG_PLANS if shard_done(small_disk, p, PLAN)]) == 2
    assert len(contents(small_disk)) == 4
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    extract_all(small_disk)
    assert contents(small_disk) == reference


def test_a_shard_that_does_not_read_back_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(handle: int) -> None:
        flip(Path(f"/proc/self/fd/{handle}").resolve(), -9)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match="does not read back as written"):
        write_one(tmp_path, PLANS[0], SAMPLES)
    assert contents(tmp_path) == {}


def test_shard_done_accepts_only_the_same_whole_shard(tmp_path: Path) -> None:
    shard, path, sidecar = PLANS[1], tmp_path / PLANS[1].name, tmp_path / "shard-000001.json"
    entry = write_one(tmp_path, shard, SAMPLES)
    data, record = path.read_bytes(), sidecar.read_text()
    assert shard_done(tmp_path, shard, PLAN) == entry
    assert shard_done(tmp_path, shard, "plan-2") is None
    assert shard_done(tmp_path, PLANS[0], PLAN) is None
    assert shard_done(tmp_path, replace(shard, samples=shard.samples[1:]), PLAN) is None
    for damaged in (data[:-1], data + b"\0", b"", data[:-1] + bytes([data[-1] ^ 1])):
        path.write_bytes(damaged)
        assert shard_done(tmp_path, shard, PLAN) is None
    path.unlink()
    assert shard_done(tmp_path, shard, PLAN) is None
    path.write_bytes(data)
    other = record.replace(shard.name, "shard-000009.safetensors")
    for text in ("", "{}", "[]", record[:-5], record.replace('"tokens"', '"token"'), other):
        sidecar.write_text(text)
        assert shard_done(tmp_path, shard, PLAN) is None
    sidecar.unlink()
    assert shard_done(tmp_path, shard, PLAN) is None
    sidecar.write_text(record)
    assert shard_done(tmp_path, shard, PLAN) == entry


# ---- damage


def test_truncated_missing_and_swapped_shards(states: Path) -> None:
    path = states / PLANS[1].name
    data = path.read_bytes()
    for size in [0, 4, 8, 100, 300, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match=rf"{path.name} in .* is damaged: .*; run extract/main"):
            ShardReader(states)
        assert len(verify(states)) == 1
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name} is missing in .*; run extract/main"):
        ShardReader(states)
    assert len(verify(states)) == 1
    path.write_bytes((states / PLANS[2].name).read_bytes())
    with pytest.raises(UserError, match=rf"{path.name} in .* is damaged"):
        ShardReader(states)


def test_any_flipped_bit_is_found_and_none_crashes_the_reader(states: Path) -> None:
    path = states / PLANS[1].name
    data, rng = path.read_bytes(), random.Random(0)
    silent = 0
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for byte in [*range(header + 24), *range(header + 24, len(data), 3)]:
        flip(path, byte, 1 << rng.randrange(8))
        try:
            reader = ShardReader(states)
            for i in range(len(reader)):
                assert len(reader[i].input_ids) == len(reader[i].hidden_states) == reader.lengths[i]
            silent += 1  # only in the data, and in names of samples
        except UserError as error:
            assert path.name in str(error)
        if byte % 13 == 0:
            with pytest.raises(UserError, match=path.name):
                ShardReader(states, verify_checksums=True)
            assert len(found := verify(states)) == 1
            assert path.name in found[0]
        path.write_bytes(data)
    assert silent > 0
    assert verify(states) == []


def forge(folder: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> Path:
    """Edit shard 1 and make sizes and checksums agree again, as only a faulty program would."""
    path = folder / PLANS[1].name
    with safe_open(path, "pt") as file:
        tensors, metadata = load_file(path), file.metadata()
    change(tensors, metadata)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)
    manifest = read_manifest(folder)
    size, digest = path.stat().st_size, file_sha256(path)
    entries = [
        e.model_copy(update={"bytes": size, "sha256": digest}) if e.file == path.name else e
        for e in manifest.shards
    ]
    write_manifest(folder, manifest_of(entries))
    return path


def nan_at_4(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["hidden_states"][4, 3] = float("nan")


FORGED: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, str]], object], str]] = {
    "row gap": (lambda t, m: t.update(hidden_states=t["hidden_states"][:-1]), r"\(5, 16\).*\(6, 16\)"),
    "wide": (lambda t, m: t.update(hidden_states=t["hidden_states"].repeat(1, 2)), r"\(6, 32\).*\(6, 16\)"),
    "dtype": (lambda t, m: t.update(hidden_states=t["hidden_states"].half()), "F16"),
    "token ids": (lambda t, m: t.update(input_ids=t["input_ids"].long()), "I64"),
    "no mask": (lambda t, m: t.pop("loss_mask"), "loss_mask is None"),
    "extra": (lambda t, m: t.update(more=torch.ones(2)), "more is"),
    "offsets": (lambda t, m: t["offsets"].copy_(torch.tensor([0, 7, 6])), "offsets do not run from 0 to 6"),
    "start": (lambda t, m: t["offsets"].copy_(torch.tensor([1, 2, 6])), "offsets do not run"),
    "end": (lambda t, m: t["offsets"].copy_(torch.tensor([0, 1, 1 << 60])), "offsets do not run"),
    "empty sample": (lambda t, m: t["offsets"].copy_(torch.tensor([0, 6, 6])), "offsets do not run"),
    "mask": (lambda t, m: t["loss_mask"].fill_(1), "loss_mask"),
    "moved mask": (lambda t, m: t["loss_mask"][:2].copy_(torch.tensor([0, 1])), "loss_mask"),
    "schema": (lambda t, m: m.update(schema="2"), "its schema is 2 and ours is 1"),
    "no schema": (lambda t, m: m.clear(), "its schema is None"),
    "ids": (lambda t, m: m.update(ids='["chat-2"]'), "does not name its 2 samples"),
    "ids not text": (lambda t, m: m.update(ids="[1, 2]"), "does not name its 2 samples"),
    "ids not json": (lambda t, m: m.update(ids="["), "does not name its 2 samples"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_shard_with_another_structure_is_refused(states: Path, case: str) -> None:
    assert len(PLANS[1].samples) == 2
    change, message = FORGED[case]
    path = forge(states, change)
    with pytest.raises(UserError, match=rf"{path.name} in .* is damaged: .*{message}"):
        ShardReader(states)
    assert len(verify(states)) == 1


def test_a_shard_of_another_size_is_refused(states: Path) -> None:
    manifest = (states / "manifest.json").read_bytes()
    path = forge(states, lambda t, m: m.update(note="the same tensors"))
    assert len(ShardReader(states)) == len(SAMPLES)
    (states / "manifest.json").write_bytes(manifest)
    with pytest.raises(UserError, match=rf"{path.name} .* has \d+ bytes and the manifest says \d+"):
        ShardReader(states)


def test_nan_and_zeros_that_got_stored_name_their_sample(states: Path) -> None:
    path = forge(states, nan_at_4)
    reader = ShardReader(states)
    bad = PLANS[1].samples[1]  # rows 1 to 5 of the shard
    for i in range(len(reader)):
        if i != bad:
            assert_same(reader[i], SAMPLES[i])
    with pytest.raises(UserError, match=f"{path.name} .* sample 'chat-{bad}' has NaN or Inf"):
        reader[bad]
    with pytest.raises(UserError, match=f"sample 'chat-{bad}' has NaN or Inf"):
        list(reader.iter_shard(1))
    assert f"sample 'chat-{bad}' has NaN or Inf" in verify(states)[0]
    forge(states, lambda t, m: t["hidden_states"][0].fill_(0))
    assert "only zeros in token 0" in verify(states)[0]


def test_a_lying_header_allocates_nothing(states: Path) -> None:
    path = states / PLANS[1].name
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    lies: list[dict[str, Any]] = [
        {"shape": [1 << 40, 16], "data_offsets": [0, 1 << 45]},
        {"shape": [1 << 62, 16]},
        {"shape": [1 << 40, 0]},
        {"data_offsets": header["input_ids"]["data_offsets"]},
    ]

    def read_all() -> None:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), now + (64 << 20)))
        for lie in lies:
            text = json.dumps(header | {"hidden_states": header["hidden_states"] | lie}).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])
            with pytest.raises(UserError, match=path.name):
                ShardReader(states)
        for length in (1 << 63, 1 << 40, 90_000_000):
            path.write_bytes(struct.pack("<Q", length) + data[8:])
            with pytest.raises(UserError, match=path.name):
                ShardReader(states)

    assert run_in_fork(read_all) == 0


def test_verify_finds_strays_and_a_changed_head(tmp_path: Path) -> None:
    (tmp_path / "head.safetensors").write_bytes(b"head")
    head = TargetHead(file="head.safetensors", sha256=file_sha256(tmp_path / "head.safetensors"))
    store(tmp_path, target_head=head)
    assert verify(tmp_path) == []
    (tmp_path / "shard-000009.safetensors").touch()
    (tmp_path / ".shard-000001.safetensors.tmp").touch()
    (tmp_path / "head.safetensors").write_bytes(b"heal")
    found = verify(tmp_path)
    assert [any(name in text for text in found) for name in ("shard-000009", ".tmp", "head.")] == [
        True
    ] * 3
    (tmp_path / "head.safetensors").unlink()
    assert "head.safetensors" in verify(tmp_path)[0]


# ---- the manifest


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def entry_with(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda data: {"shards": [data["shards"][0] | changes, *data["shards"][1:]]}


EDITS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "newer": (lambda d: {"schema": 2, "more": 1}, "schema 2 and this program reads up to 1; update"),
    "schema": (lambda d: {"schema": "1"}, "malformed: schema"),
    "incomplete": (lambda d: {"complete": False}, r"incomplete \(7 samples so far\); run extract/main"),
    "unknown": (lambda d: {"shard": 1}, "malformed: shard"),
    "text for a number": (lambda d: {"hidden_size": "8"}, "malformed: hidden_size"),
    "float for a number": (lambda d: {"hidden_size": 8.0}, "malformed: hidden_size"),
    "text for a list": (lambda d: {"target_layer_ids": "18"}, "malformed: target_layer_ids"),
    "nan": (lambda d: {"answers": d["answers"] | {"temperature": float("nan")}}, "malformed: answers.temp"),
    "deep": (lambda d: {"target": {"id": "toy", "revision": None}}, "malformed: target.fingerprint"),
    "taps order": (lambda d: {"target_layer_ids": [8, 1]}, r"\[8, 1\] are not increasing"),
    "taps depth": (lambda d: {"target_layer_ids": [1, 12]}, r"\[1, 12\] .* 12 layers"),
    "convention": (lambda d: {"tap_convention": "hidden_states[i]"}, "tap_convention is 'hidden_states"),
    "parent": (entry_with(file="../shard-000000.safetensors"), "'../shard-000000.safetensors' is not"),
    "absolute": (entry_with(file="/etc/passwd"), "'/etc/passwd' is not the plain name"),
    "dots": (entry_with(file=".."), "'..' is not the plain name"),
    "backslash": (entry_with(file="..\\x"), "is not the plain name"),
    "nul": (entry_with(file="a\0"), "is not the plain name"),
    "newline": (entry_with(file="shard\n"), "is not the plain name"),
    "head": (lambda d: {"target_head": {"file": "../h", "sha256": "0" * 64}}, "'../h' is not the plain"),
    "sha": (entry_with(sha256="123"), "malformed: shards.0.sha256"),
    "twice": (lambda d: {"shards": [d["shards"][0], *d["shards"]]}, "listed twice"),
    "order": (lambda d: {"shards": d["shards"][::-1]}, "out of order"),
    "lost shard": (lambda d: {"shards": d["shards"][1:]}, "totals are .* add up to"),
    "tokens": (entry_with(tokens=999), "totals are .* add up to"),
    "other plan": (entry_with(plan_fingerprint="plan-2"), "belongs to plan plan-2 and the manifest to plan-1"),
}  # fmt: skip


@pytest.mark.parametrize("case", EDITS)
def test_edited_manifests_are_refused_in_one_sentence(states: Path, case: str) -> None:
    edit, message = EDITS[case]
    edited(states, **edit(json.loads((states / "manifest.json").read_text())))
    for read in (read_manifest, ShardReader):
        with pytest.raises(UserError, match=message) as caught:
            read(states)
        assert str(states) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert verify(states) == [str(caught.value)]


def test_manifests_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no states folder .*; run extract/main.py first"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no manifest.json; run extract/main.py again"):
        read_manifest(tmp_path)
    for text in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "manifest.json").write_bytes(text)
        with pytest.raises(UserError, match=r"manifest.json is malformed"):
            read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*manifest.json"):
        read_manifest(tmp_path)


def test_manifest_round_trip_and_require(states: Path) -> None:
    manifest = read_manifest(states)
    assert manifest == manifest_of(manifest.shards)
    assert json.loads((states / "manifest.json").read_text())["schema"] == SCHEMA
    require(manifest, states)
    require(manifest, states, target_layer_ids=[1, 8], mask_token_id=299, target=manifest.target)
    require(manifest, states, **{"target.fingerprint": "f00d", "answers.greedy": True})
    with pytest.raises(UserError) as caught:
        require(manifest, states, target_layer_ids=(1, 9), hidden_size=8)
    assert str(caught.value) == (
        f"states in {states} were made with target_layer_ids=[1, 8], the config says [1, 9]; "
        "extract again into another run_dir or change the config"
    )
    with pytest.raises(
        UserError, match=r"target\.id=\"toy\", the config says \"x\", and with enable_t.*=null"
    ):
        require(manifest, states, **{"target.id": "x", "enable_thinking": True})
    edited(states, complete=False)
    assert read_manifest(states, incomplete_ok=True).shards == manifest.shards


def test_no_samples_at_all(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest_of([]))
    reader = ShardReader(tmp_path, verify_checksums=True)
    assert (len(reader), reader.lengths, reader.ids, reader.supervised) == (0, [], [], [])
    assert verify(tmp_path) == []
    with pytest.raises(IndexError):
        reader[0]


# ---- the reader in training


def mapped_shards() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "/shard-" in line}


def test_few_files_are_open_and_samples_hold_none(tmp_path: Path) -> None:
    lengths = [3] * 40
    samples, plans = make_samples(lengths), plan(lengths, shard_tokens=6, batch_tokens=6)
    store(tmp_path, samples, plans)

    def read() -> None:
        handles = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        reader = ShardReader(tmp_path)
        assert len(mapped_shards()) <= 1
        kept = [reader[i] for i in random.Random(0).choices(range(40), k=200)]
        assert len(mapped_shards()) == 8
        assert len(os.listdir("/proc/self/fd")) <= handles + 8  # noqa: PTH208
        for sample in kept:
            assert_same(sample, samples[int(sample.id[5:])])
            assert sample.hidden_states.untyped_storage().nbytes() == sample.hidden_states.nbytes
        recent = [int(s.id[5:]) // 2 for s in kept]
        names = {f"shard-{k:06d}.safetensors" for k in list(dict.fromkeys(recent[::-1]))[:8]}
        assert {Path(name).name for name in mapped_shards()} == names
        del reader
        assert mapped_shards() == set()

    assert run_in_fork(read) == 0


def test_workers_and_pickles_read_the_same(states: Path) -> None:
    reader = ShardReader(states)
    assert_same(reader[0], SAMPLES[0])  # a file is open when the workers fork
    # a sequence will do, and the stub wants a Dataset
    loader: Any = torch.utils.data.DataLoader(reader, batch_size=None, num_workers=2)  # type: ignore[arg-type]
    for found, wanted in zip(loader, SAMPLES, strict=True):
        assert_same(found, wanted)
    copy = pickle.loads(pickle.dumps(reader))
    assert_same(copy[6], SAMPLES[6])
    assert_same(reader[6], SAMPLES[6])
