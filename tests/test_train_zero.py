"""DeepSpeed runs of two real processes: without a compiler, from a config of `auto`s, stopped by a signal to one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
import yaml
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors import safe_open
from torch import Tensor

from configs.load import UserError, load_config
from configs.schema import Config
from tests.conftest import family, write_config
from tests.test_extract_shards import flip
from tests.test_pipeline import ROOT, copy_run, extracted, launch, metrics
from train.finished import complete_checkpoints
from train.zero import settle, talk_through_gloo

__all__ = ["extracted"]  # a fixture

AUTO = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
}  # fmt: skip
LAUNCH = {
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "num_processes": 2,
    "main_process_port": 0,
}


class Stopped(NamedTuple):
    config: Path
    run_dir: Path
    launcher: Path
    status: int
    out: str
    extensions: Path


def rank_of(pid: int) -> str | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((v[5:].decode() for v in variables if v.startswith(b"RANK=")), None)


@pytest.fixture(scope="module")
def stopped(extracted: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("zero")
    config = copy_run(
        extracted, folder, max_steps=5000, epochs=5000, max_length=48, batch_size=1,
        gradient_accumulation_steps=2, checkpoint_every=5000,
    )  # fmt: skip
    (folder / "ds.json").write_text(json.dumps(AUTO))
    launcher = folder / "accelerate.yaml"
    plugin = {"deepspeed_config_file": str(folder / "ds.json"), "zero3_init_flag": False}
    launcher.write_text(yaml.safe_dump(LAUNCH | {"deepspeed_config": plugin}))
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    assert not any(shutil.which(name, path=str(folder / "bin")) for name in ("c++", "gcc", "ninja"))
    run_dir = Path(load_config(config).run_dir)
    how = ["-m", "accelerate.commands.launch", "--config_file", str(launcher)]
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CXX")},
        "OMP_NUM_THREADS": "1", "PATH": str(folder / "bin"), "TORCH_EXTENSIONS_DIR": str(folder / "ext"),
    }  # fmt: skip
    with (folder / "out").open("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *how, "train/main.py", "--config", str(config)],
            cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
        while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < 3:
            assert process.poll() is None, (folder / "out").read_text()
            time.sleep(0.05)
        (second,) = (pid for pid in family(process.pid) if rank_of(pid) == "1")
        os.kill(second, signal.SIGTERM)
        status = process.wait(timeout=120)
    return Stopped(config, run_dir, launcher, status, (folder / "out").read_text(), folder / "ext")


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_stops_both_with_a_checkpoint(stopped: Stopped) -> None:
    """D3: saving is collective, so one that stopped alone would leave the other in a barrier."""
    last = metrics(stopped.run_dir)[-1]["step"]
    (checkpoint,) = complete_checkpoints(stopped.run_dir)
    assert checkpoint.name == f"step-{last:06d}" and last < 5000 and stopped.status != 0
    assert f"stopped by another process's signal at step {last}; add --resume" in stopped.out
    files = json.loads((checkpoint / "resume" / "trainer.json").read_text())["files"]
    assert [f for f in files if f.endswith("optim_states.pt")] == [
        f"state/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)
    ]


@pytest.mark.slow
def test_no_compiler_is_needed(stopped: Stopped) -> None:
    """D21: neither for the optimizer nor for the processes' talk on a CPU."""
    assert len(metrics(stopped.run_dir)) >= 3
    assert not list(stopped.extensions.rglob("*.so")) and "built successfully" not in stopped.out


def test_nothing_is_compiled_on_a_cpu_even_where_it_could_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that is killed meanwhile leaves a lock at which all later ones wait, in every folder."""
    builds = deepspeed.ops.__compatible_ops__
    monkeypatch.setitem(builds, ShareMemCommBuilder.NAME, True)
    talk_through_gloo()
    assert build_shm_op() is None


@pytest.mark.slow
def test_the_resolved_config_is_kept_and_has_no_auto(stopped: Stopped) -> None:
    """D20."""
    text = (stopped.run_dir / "deepspeed.json").read_text()
    resolved = json.loads(text)
    assert '"auto"' not in text
    assert resolved["train_micro_batch_size_per_gpu"] == 1
    assert resolved["gradient_accumulation_steps"] == 2 and resolved["gradient_clipping"] == 1.0
    assert resolved["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 64 * 64}


@pytest.mark.slow
def test_a_missing_and_a_damaged_file_of_a_rank_are_named(stopped: Stopped) -> None:
    """D13: DeepSpeed itself looks for no checksum. Both ranks stop, with the file's name and what to do."""
    (checkpoint,) = complete_checkpoints(stopped.run_dir)
    state = checkpoint / "resume" / "state"
    mine, theirs = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    good = (state / theirs).read_bytes()
    flip(state / mine, (state / mine).stat().st_size // 2)
    (state / theirs).unlink()
    command = ["train/main.py", "--config", str(stopped.config), "--resume"]
    out = launch(*command, processes=2, config_file=str(stopped.launcher), status=1)
    assert f"state/{mine} is damaged, state/{theirs} is missing; delete {checkpoint}" in out
    flip(state / mine, (state / mine).stat().st_size // 2)
    (state / theirs).write_bytes(good)


def floats(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a run goes on from: (weights by the drafter's names, all other tensors of a rank's files by their path)."""
    folder, other = checkpoint / "resume", {}

    def walk(at: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            other[at] = value
        elif isinstance(value, dict | list):
            for k, v in value.items() if isinstance(value, dict) else enumerate(value):
                walk(f"{at}/{k}", v)

    for file in sorted(folder.glob("state/*optim_states.pt")):
        walk(file.name, torch.load(file, weights_only=False))  # written by this test
    modules = torch.load(next(folder.glob("state/*model_states.pt")), weights_only=False)
    if other:
        return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="state"), other
    walk("", modules["optimizer"])  # stage 0
    return modules["module"], other


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_goes_on_from_float32_tensors_alone(
    extracted: Path, tmp_path: Path, stage: int
) -> None:
    """Under bfloat16 arithmetic: masters and moments are float32, norm weights move at 6e-4, and a resumed run ends with
    the same bytes of all of them. DeepSpeed's files are loaded without unpickling anything but its three classes."""
    config = copy_run(
        extracted, tmp_path, max_steps=4, epochs=9, max_length=48, batch_size=1, checkpoint_every=2, precision="bf16"
    )  # fmt: skip
    run_dir, file = Path(load_config(config).run_dir), f"configs/accelerate/zero{stage}.yaml"
    command = ["train/main.py", "--config", str(config)]
    launch(*command, processes=2, config_file=file)
    whole = metrics(run_dir)[-1]["loss"], floats(last := complete_checkpoints(run_dir)[-1])
    weights, moments = whole[1]
    with safe_open(last / "model.safetensors", "pt") as stored:
        assert set(weights) == set(stored.keys())  # the drafter's alone
    size = sum(w.numel() for w in weights.values())
    assert sum(m.numel() for name, m in moments.items() if "exp_avg_sq" in name) >= size
    assert {t.dtype for t in (*weights.values(), *moments.values())} == {torch.float32}
    for name, weight in weights.items():
        if weight.dim() == 1:
            assert 3e-4 < (weight - 1).abs().max() < 4e-3, name

    shutil.rmtree(last)
    launch(*command, "--resume", processes=2, config_file=file)
    assert metrics(run_dir)[-1]["loss"] == whole[0] and metrics(run_dir)[-1]["step"] == 4
    for before, after in zip(whole[1], floats(last), strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture
def config(tmp_path: Path, tiny_target: Path) -> Config:
    return load_config(write_config(tmp_path / "c.yaml", tiny_target))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": {"type": "Adam"}}, r"section optimizer \(Adam\).*train\.optimizer=adamw"),
        ({"scheduler": {"type": "WarmupLR"}}, r"section scheduler \(WarmupLR\)"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer on cpu"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param on nvme"),
    ],
)  # fmt: skip
def test_what_would_take_the_place_of_our_optimizer_is_refused(
    config: Config, given: dict[str, Any], said: str
) -> None:
    """D21: DeepSpeed compiles an Adam for an offloaded optimizer, and one in its config would win over ours."""
    settle(config, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}})
    with pytest.raises(UserError, match=said):
        settle(config, {"zero_optimization": {"stage": 2}} | given)


def test_no_precision_of_deepspeeds_own_is_left(config: Config) -> None:
    """Its bf16 would keep the weights in bfloat16, where norms stand still; ours is train.precision."""
    given: dict[str, Any] = {
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "fp16": {"enabled": True},
        "train_batch_size": 64,
    }  # fmt: skip
    settle(config, given)
    assert not given.keys() & {"bf16", "fp16", "train_batch_size"}
    assert given["gradient_clipping"] == 1.0
