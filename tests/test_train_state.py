"""What a training run survives: kills, signals, other process counts, NaN in its data. As its user starts it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from torch import Tensor

from configs.load import load_config
from configs.provenance import lock_owner
from extract.shards import ShardReader
from tests.conftest import family
from tests.test_pipeline import ROOT, close, copy_run, extracted, gradients, launch, metrics, run
from train.batches import Schedule, pack
from train.finished import complete_checkpoints
from train.layout import load_drafter

__all__ = ["extracted"]  # a fixture
pytestmark = pytest.mark.slow

TIMES = ("tokens_per_second", "slots_per_second", "data_wait", "seconds", "peak_memory_bytes")
ZERO2 = "configs/accelerate/zero2.yaml"


def run_dir_of(config: Path) -> Path:
    return Path(load_config(config).run_dir)


def record(config: Path) -> list[dict]:
    """metrics.jsonl without what the clock and the machine say."""
    return [{k: v for k, v in m.items() if k not in TIMES} for m in metrics(run_dir_of(config))]


def state_bytes(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor of float32 weights and optimizer state, by its path."""
    out: dict[str, bytes] = {}

    def walk(at: str, value: Any) -> None:
        if isinstance(value, Tensor):
            out[at] = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(value, dict):
            for k, v in value.items():
                walk(f"{at}/{k}", v)

    walk("", torch.load(checkpoint / "resume" / "state.pt", weights_only=True))
    assert any("exp_avg_sq" in name for name in out)
    return out


def command(config: Path, processes: int, *more: str) -> list[str]:
    train = ["train/main.py", "--config", str(config), *more]
    if processes == 1:
        return [sys.executable, *train]
    how = ["--config_file", "configs/accelerate/cpu2.yaml", "--num_processes", str(processes)]
    return [sys.executable, "-m", "accelerate.commands.launch", *how, *train]


def interrupt(config: Path, processes: int, how: signal.Signals, at: int) -> None:
    """Start the run and end it as soon as its record has step `at`: SIGTERM to the launcher, SIGKILL to everything."""
    run_dir = run_dir_of(config)
    process = subprocess.Popen(
        command(config, processes), cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < at:
        time.sleep(0.05)
        assert process.poll() is None
    for member in [process.pid] if how == signal.SIGTERM else family(process.pid):
        os.kill(member, how)
    process.wait(timeout=60)
    for _ in range(600):
        if lock_owner(run_dir, "train") is None:
            break
        time.sleep(0.1)
    if processes == 1:
        assert process.returncode == (128 + how if how == signal.SIGTERM else -how)


LONG = {"max_steps": 240, "epochs": 240, "max_length": 48, "batch_size": 1, "checkpoint_every": 20,
        "keep_checkpoints": 99, "head_tokens": 64}  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def whole(
    request: pytest.FixtureRequest, extracted: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path]:
    """A number of processes and their uninterrupted run."""
    config = copy_run(extracted, tmp_path_factory.mktemp("whole"), **LONG)
    subprocess.run(command(config, request.param), cwd=ROOT, check=True, timeout=300)
    return request.param, config


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
def test_interrupted_and_resumed_is_the_uninterrupted_run(extracted, whole, tmp_path, how):
    """The same losses, learning rates, norms and held-out values, bit for bit, and in the end the same bytes of weights
    and moments. SIGTERM leaves a checkpoint of its own; after SIGKILL the last scheduled one counts."""
    processes, uninterrupted = whole
    config = copy_run(extracted, tmp_path, **LONG)
    run_dir = run_dir_of(config)
    interrupt(config, processes, how, at=random.randint(22, 90))
    stopped_at = metrics(run_dir)[-1]["step"]
    assert 20 < stopped_at < 240
    latest = complete_checkpoints(run_dir)[-1]
    if how == signal.SIGTERM:
        assert latest.name == f"step-{stopped_at:06d}"
        assert "--resume" in run("train/main.py", "--config", str(config), status=2)
    else:
        # a step is logged before its checkpoint is complete
        possible = {stopped_at // 20 * 20, (stopped_at - 1) // 20 * 20}
        assert latest.name in {f"step-{step:06d}" for step in possible}
    half = run_dir / "checkpoints" / "step-000999"  # never finished, so it must not be picked
    shutil.copytree(latest, half)
    (half / "DONE").unlink()

    subprocess.run(
        command(config, processes, "--resume"), cwd=ROOT, check=True, timeout=300,
    )  # fmt: skip
    assert record(config) == record(uninterrupted)
    assert "held_out_loss" in record(config)[-1]
    ours, theirs = (complete_checkpoints(run_dir_of(c)) for c in (config, uninterrupted))
    assert state_bytes(ours[-1]) == state_bytes(theirs[-1])
    assert (ours[-1] / "model.safetensors").read_bytes() == (
        theirs[-1] / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("whole", [1], indirect=True)
def test_the_held_out_measurement_changes_nothing(extracted, whole, tmp_path):
    _, measured = whole
    config = copy_run(extracted, tmp_path, **LONG)
    shutil.rmtree(run_dir_of(config) / "eval-sets")
    run("train/main.py", "--config", str(config))
    bare = [{k: v for k, v in m.items() if not k.startswith("held_out")} for m in record(measured)]
    assert record(config) == bare
    held = [m for m in record(measured) if "held_out_tau_proxy" in m]
    assert [m["step"] for m in held] == sorted({*range(12, 241, 12), *range(20, 241, 20)})
    assert held[-1]["held_out_loss"] < held[0]["held_out_loss"]


@pytest.mark.parametrize("whole", [2], indirect=True)
def test_another_number_of_processes_goes_on_when_the_rows_of_a_step_are_as_many(
    extracted, whole, tmp_path
):
    _, uninterrupted = whole
    config = copy_run(extracted, tmp_path, **{**LONG, "batch_size": 2})
    run_dir = run_dir_of(config)
    for checkpoint in complete_checkpoints(run_dir_of(uninterrupted))[:-1]:
        shutil.copytree(checkpoint, run_dir / "checkpoints" / checkpoint.name)
    run("train/main.py", "--config", str(config), "--resume")
    close(gradients(config), gradients(uninterrupted)[-20:], 1e-4)
    more = run(
        "train/main.py",
        "--config",
        str(config),
        "--resume",
        "--set",
        "train.batch_size=3",
        status=2,
    )
    assert "rows per step" in more


def test_deepspeed_resumes_bit_for_bit_and_with_as_many_processes_only(extracted, tmp_path):
    settings = {"max_steps": 12, "epochs": 12, "max_length": 48, "batch_size": 1, "checkpoint_every": 4}  # fmt: skip
    whole, parts = (copy_run(extracted, tmp_path / name, **settings) for name in ("whole", "parts"))
    for config in (whole, parts):
        launch("train/main.py", "--config", str(config), processes=2, config_file=ZERO2)
    for checkpoint in complete_checkpoints(run_dir_of(parts))[1:]:
        shutil.rmtree(checkpoint)  # only the first survives
    launch("train/main.py", "--config", str(parts), "--resume", processes=2, config_file=ZERO2)
    assert record(parts) == record(whole)
    a, b = (complete_checkpoints(run_dir_of(c))[-1] for c in (whole, parts))
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()

    shutil.rmtree(b)
    resume = ["train/main.py", "--config", str(parts), "--resume", "--set", "train.batch_size=2"]
    out = launch(*resume, processes=1, config_file=ZERO2, status=1)
    assert "trained by 2 processes and this run has 1; DeepSpeed's state is cut up by rank" in out
    assert "without DeepSpeed; launch it as before" in run(*resume, status=2)


def poison(config: Path, number: int) -> str:
    """Write a NaN into the stored states of a sample, as a bad disk would; returns the sample's id."""
    reader = ShardReader(run_dir_of(config) / "states")
    name, first = reader.ids[number], number
    for entry in reader.manifest.shards:
        if first < entry.samples:
            break
        first -= entry.samples
    path = reader.folder / entry.file
    with safe_open(path, "pt") as file:
        row = int(file.get_slice("offsets")[first : first + 1])
    raw = bytearray(path.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    states = json.loads(raw[8 : 8 + header])["hidden_states"]
    at = 8 + header + states["data_offsets"][0] + 4 * row * states["shape"][1]
    raw[at : at + 4] = b"\x00\x00\xc0\x7f"
    path.write_bytes(raw)
    return name


def poisoned_steps(config: Path, number: int, world: int) -> list[int]:
    settings = load_config(config)
    options = settings.train
    lengths = ShardReader(run_dir_of(config) / "states").lengths
    schedule = Schedule(
        pack(lengths, options.max_length), options.epochs, options.batch_size,
        options.gradient_accumulation_steps, world, settings.seed,
    )  # fmt: skip
    assert options.max_steps
    return [
        step + 1
        for step in range(options.max_steps)
        for micro in range(options.gradient_accumulation_steps)
        for rank in range(world)
        for visit in schedule.micro_batch(step, micro, rank)
        if number in visit.samples
    ]


BRIEF = {"max_steps": 9, "epochs": 9, "max_length": 48, "batch_size": 1,
         "gradient_accumulation_steps": 2}  # fmt: skip


def test_a_nan_in_a_shard_ends_the_run_on_all_ranks_and_names_the_sample(extracted, tmp_path):
    config = copy_run(extracted, tmp_path, **BRIEF)
    name = poison(config, 3)
    step = poisoned_steps(config, 3, world=2)[0]
    out = launch("train/main.py", "--config", str(config), processes=2, status=1)
    assert (
        f"step {step} has gradient norm nan; samples with NaN or Inf in their stored states: {name} (rank"
        in out
    )
    assert "train.nonfinite=skip" in out


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_skipped_step_leaves_nothing_behind(extracted, tmp_path, stage):
    """Two processes, of which one has the NaN: every loss after it, and the weights in the end, are those of a run that
    never saw that step."""
    config = copy_run(extracted, tmp_path, **BRIEF, nonfinite="skip")
    number = next(n for n in range(8) if poisoned_steps(config, n, world=2)[0] > 1)
    name, bad = poison(config, number), poisoned_steps(config, number, world=2)
    assert len(bad) >= 2 and len(bad) + 3 <= BRIEF["max_steps"]
    file = None if stage is None else f"configs/accelerate/zero{stage}.yaml"
    out = launch("train/main.py", "--config", str(config), processes=2, config_file=file)
    assert out.count(f"stored states: {name} (rank") == len(bad)
    lines = metrics(run_dir_of(config))
    assert [m["step"] for m in lines] == [s for s in range(1, 10) if s not in bad]
    skipped_before = {
        s: s - 1 - max((p for p in range(1, s) if p not in bad), default=0) for s in range(1, 10)
    }
    assert {m["step"]: m["skipped_steps"] for m in lines} == {
        m["step"]: skipped_before[m["step"]] for m in lines
    }

    plain = copy_run(extracted, tmp_path / "plain", **BRIEF, nonfinite="skip")
    shutil.rmtree(run_dir_of(plain) / "states")
    shutil.copytree(run_dir_of(config) / "states", run_dir_of(plain) / "states")
    raw = yaml.safe_load(plain.read_text())
    raw["train"] |= {"batch_size": 4, "gradient_accumulation_steps": 1}
    plain.write_text(yaml.safe_dump(raw))
    run("train/main.py", "--config", str(plain))
    close(gradients(config), gradients(plain), 1e-4)
    ours, theirs = (load_drafter(complete_checkpoints(run_dir_of(c))[-1]) for c in (config, plain))
    for key, value in theirs.state_dict().items():
        assert value.isfinite().all()
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=2e-2, atol=2e-3, msg=key)


def test_a_logged_line_sums_its_steps_and_counts_the_skipped_ones(extracted, tmp_path):
    each, fourth = (
        copy_run(extracted, tmp_path / name, **BRIEF, nonfinite="skip") for name in "ab"
    )
    number = next(n for n in range(8) if poisoned_steps(each, n, world=1)[0] > 1)
    for config, every in ((each, 1), (fourth, 4)):
        poison(config, number)
        run("train/main.py", "--config", str(config), "--set", f"train.log_every={every}")
    bad = poisoned_steps(each, number, world=1)
    steps = {m["step"]: m for m in metrics(run_dir_of(each))}
    assert sorted(steps) == [s for s in range(1, 10) if s not in bad]
    lines, seen = metrics(run_dir_of(fourth)), 0
    assert lines[-1]["step"] == 9
    for line in lines:
        span = range(seen + 1, line["step"] + 1)
        assert line["skipped_steps"] == sum(s in bad for s in span)
        assert line["tokens"] == sum(steps[s]["tokens"] for s in span if s in steps)
        losses = [steps[s]["loss"] for s in span if s in steps]
        assert min(losses) <= line["loss"] <= max(losses)
        seen = line["step"]


def test_ten_skipped_steps_in_a_row_end_the_run(extracted, tmp_path):
    config = copy_run(
        extracted, tmp_path, max_steps=40, epochs=40, max_length=48, batch_size=8, nonfinite="skip"
    )
    name = poison(config, 3)
    out = run("train/main.py", "--config", str(config), status=2)
    assert "10 steps in a row were skipped; step 10 has" in out and name in out
    assert not complete_checkpoints(run_dir_of(config))
