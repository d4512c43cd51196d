"""Checkpoints: which one is found, which ones stay, and that reading one back changes no byte."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import Qwen3Config

from configs.load import UserError
from configs.schema import TrainConfig
from tests.test_extract_shards import flip
from train.checkpoint import (
    complete_checkpoints,
    delete_old,
    find_checkpoint,
    load_checkpoint,
    read_best,
    record_best,
    save_checkpoint,
    trainer_state,
)
from train.drafter import DFlashDrafter, DraftShape
from train.layout import load_drafter
from train.optimizer import make_optimizer, set_learning_rate
from train.step import backward, optimizer_step


def fake(run_dir: Path, *steps: int) -> list[Path]:
    folders = [run_dir / "checkpoints" / f"step-{step:06d}" for step in steps]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "DONE").touch()
    return folders


def names(run_dir: Path) -> list[str]:
    return [folder.name for folder in complete_checkpoints(run_dir)]


def test_the_best_is_found_and_outlives_all_newer_ones(tmp_path):
    folders = fake(tmp_path, 10, 20, 30, 40)
    assert record_best(tmp_path, folders[1], 2.5, "chain, mean over the held-out sets")
    delete_old(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000020", "step-000040"]
    assert find_checkpoint(tmp_path, "best") == folders[1]
    assert record_best(tmp_path, folders[3], 2.6, "chain, gsm8k")
    fake(tmp_path, 50)
    delete_old(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000040", "step-000050"]
    assert not folders[1].exists()


def test_without_a_best_the_sentence_says_how_to_get_one(tmp_path):
    (only,) = fake(tmp_path, 10)
    with pytest.raises(UserError, match="--checkpoint all --mode replay"):
        find_checkpoint(tmp_path, "best")
    record_best(tmp_path, only, 2.0, "chain, x")
    (only / "DONE").unlink()
    with pytest.raises(UserError, match="step-000010, which is gone"):
        find_checkpoint(tmp_path, "best")


def test_a_deleted_checkpoint_cannot_become_the_best(tmp_path):
    old, new = fake(tmp_path, 10, 20)
    record_best(tmp_path, new, 2.0, "chain, x")
    (old / "DONE").unlink()
    assert not record_best(tmp_path, old, 3.0, "chain, x")
    assert read_best(tmp_path) == {"checkpoint": "step-000020", "tau": 2.0, "by": "chain, x"}


def test_a_kill_while_the_best_is_recorded_leaves_the_old_record(tmp_path, monkeypatch):
    old, new = fake(tmp_path, 10, 20)
    record_best(tmp_path, old, 2.0, "chain, x")

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("configs.provenance.os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        record_best(tmp_path, new, 3.0, "chain, x")
    assert find_checkpoint(tmp_path, "best") == old


def test_a_million_steps_are_more_than_999999(tmp_path):
    fake(tmp_path, 999_999, 1_000_000)
    assert find_checkpoint(tmp_path, "latest").name == "step-1000000"


def drafter(seed: int) -> DFlashDrafter:
    config = Qwen3Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=32,
    )  # fmt: skip
    model = DFlashDrafter(config, DraftShape(4, 31, (1, 3), 6))
    model.reset_parameters(seed)
    return model


def forward(model: Any) -> Tensor:
    """A loss of one row: 6 context tokens, one block."""
    generator = torch.Generator().manual_seed(7)
    features, slots = (torch.randn(1, n, w, generator=generator) for n, w in ((6, 32), (4, 16)))
    masks = {"full_attention": torch.ones(1, 1, 4, 10, dtype=torch.bool)}
    out = model(features, torch.arange(6)[None], slots, torch.arange(6, 10)[None], masks)
    loss: Tensor = (out.float() * torch.randn(1, 4, 16, generator=generator)).square().mean()
    return loss


def trained(steps: int, name: Any = "adamw") -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model: Any = drafter(0)
    optimizer: Any = make_optimizer(model, TrainConfig(optimizer=name))
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(steps):
        backward(accelerator, model, forward(model))
        assert optimizer_step(accelerator, model, optimizer, 1.0)[1]
    return accelerator, model, optimizer


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """Weights and optimizer state, as bytes."""

    def as_bytes(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(value, dict):
            return {str(k): as_bytes(v) for k, v in value.items()}
        return [as_bytes(v) for v in value] if isinstance(value, list) else value

    out: dict[str, Any] = as_bytes({"m": model.state_dict(), "o": optimizer.state_dict()})
    return out


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_checkpoint_is_read_back_to_the_byte(tmp_path, name):
    accelerator, model, optimizer = trained(3, name)
    folder = save_checkpoint(
        tmp_path, accelerator, model, optimizer, step=3, card="", trainer={}, keep=4
    )
    before = everything(model, optimizer)
    _, again, fresh = trained(1, name)
    assert everything(again, fresh) != before
    load_checkpoint(folder, accelerator, again, fresh)
    assert everything(again, fresh) == before
    for optimizer_, weights in ((optimizer, model), (fresh, again)):  # and goes on alike
        set_learning_rate(optimizer_, 0.25)
        backward(accelerator, weights, forward(weights))
        optimizer_step(accelerator, weights, optimizer_, 1.0)
    assert everything(again, fresh) == everything(model, optimizer) != before
    set_learning_rate(fresh, 0.0)  # which has to reach whoever steps
    still = everything(again, fresh)["m"]
    backward(accelerator, again, forward(again))
    optimizer_step(accelerator, again, fresh, 1.0)
    assert everything(again, fresh)["m"] == still
    assert json.loads((folder / "resume" / "trainer.json").read_text())["step"] == 3


def test_a_half_deleted_checkpoint_of_the_same_step_is_written_anew(tmp_path):
    """A run that was killed while it deleted, and resumed from before, comes to that step again."""
    accelerator, model, optimizer = trained(1)
    save = partial(
        save_checkpoint, tmp_path, accelerator, model, optimizer, card="", trainer={}, keep=4
    )
    folder = save(step=1)
    (folder / "DONE").unlink()
    (folder / "resume" / "state.pt").unlink()
    assert names(tmp_path) == []
    assert save(step=1) == folder and names(tmp_path) == ["step-000001"]
    load_checkpoint(folder, accelerator, model, optimizer)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any, Any, Any]:
    accelerator, model, optimizer = trained(1)
    folder = save_checkpoint(
        tmp_path, accelerator, model, optimizer, step=1, card="", trainer={}, keep=4
    )
    return folder, accelerator, model, optimizer


def test_done_is_read_by_sha256sum(saved):
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "DONE"], cwd=saved[0], text=True, capture_output=True
    )
    assert done.returncode == 0
    assert done.stdout == "model.safetensors: OK\nconfig.json: OK\nresume/trainer.json: OK\n"


def test_any_flipped_bit_of_a_checkpoint_is_found_by_the_name_of_its_file(saved):
    """Whoever reads it: evaluation and init_from the weights, a resumed run its state."""
    folder, accelerator, model, optimizer = saved
    generator = random.Random(0)

    def read(file: Path) -> None:
        if file.name == "state.pt":
            load_checkpoint(folder, accelerator, model, optimizer)
        elif file.name == "trainer.json":
            trainer_state(folder)
        else:
            load_drafter(folder)

    for name, times in {
        "model.safetensors": 20,
        "config.json": 10,
        "resume/trainer.json": 10,
        "resume/state.pt": 40,
    }.items():
        file, good = folder / name, (folder / name).read_bytes()
        read(file)
        # what torch.save pads between records is nobody's
        payload = range(len(good)) if name != "resume/state.pt" else checked_bytes(file)
        for _ in range(times):
            flip(file, generator.choice(payload), 1 << generator.randrange(8))
            with pytest.raises(
                (UserError, ValueError), match=f"{file.name} is damaged.*(delete|--resume)"
            ):
                read(file)
            file.write_bytes(good)
        file.write_bytes(good[: len(good) // 2])
        with pytest.raises((UserError, ValueError), match=f"{file.name} is damaged"):
            read(file)
        file.write_bytes(good)
    (folder / "resume" / "state.pt").unlink()
    with pytest.raises(UserError, match=r"state.pt is missing; delete .*init_from="):
        load_checkpoint(folder, accelerator, model, optimizer)


def checked_bytes(file: Path) -> list[int]:
    """Where the contents of the records of a torch.save file lie."""
    out: list[int] = []
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            name, extra = struct.unpack("<HH", file.read_bytes()[record.header_offset + 26 :][:4])
            start = record.header_offset + 30 + name + extra
            out += range(start, start + record.file_size)
    return out


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/proc/self/evil",)


def test_a_resume_state_that_would_run_code_is_not_loaded(saved):
    folder, accelerator, model, optimizer = saved
    torch.save({"model": Evil()}, folder / "resume" / "state.pt")
    with pytest.raises(UserError, match="other things than tensors"):
        load_checkpoint(folder, accelerator, model, optimizer)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"{}", b"\xff", b'{"checkpoint": "step-1"}'])
def test_a_damaged_record_of_the_best_deletes_nothing_and_is_written_anew(tmp_path, capsys, raw):
    folders = fake(tmp_path, 10, 20, 30)
    (tmp_path / "checkpoints" / "best.json").write_bytes(raw)
    with pytest.raises(UserError, match=r"best\.json is damaged; delete it, and eval/main\.py"):
        find_checkpoint(tmp_path, "best")
    delete_old(tmp_path, keep=1)
    assert len(names(tmp_path)) == 3 and "no checkpoint is deleted" in capsys.readouterr().err
    record_best(tmp_path, folders[1], 2.5, "chain")
    delete_old(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000020", "step-000030"]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(where):
    accelerator, model, optimizer = trained(2)
    before = everything(model, optimizer)
    loss = forward(model)
    if where == "loss":  # of which the gradient alone would be finite
        loss = loss + torch.tensor(torch.inf)
    else:
        model.norm.weight.register_hook(lambda g: g.index_fill(0, torch.tensor(3), torch.nan))
    backward(accelerator, model, loss)
    norm, finite = optimizer_step(accelerator, model, optimizer, 1.0)
    assert not finite and norm != norm
    assert everything(model, optimizer) == before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_gradients_are_clipped_to_the_limit_and_their_norm_is_that_before(limit):
    """AdamW divides the size of its gradients out again, so no loss curve would show a clip that is missing."""
    accelerator, model, optimizer = trained(0)
    backward(accelerator, model, forward(model))
    raw = [p.grad.clone() for p in model.parameters()]
    size = float(torch.cat([g.flatten() for g in raw]).norm())
    assert 0.01 < size < 1e6
    norm, _ = optimizer_step(accelerator, model, optimizer, limit)
    assert norm == pytest.approx(size)
    for p, gradient in zip(model.parameters(), raw, strict=True):
        first = optimizer.state[p]["exp_avg"] / (1 - 0.9)
        torch.testing.assert_close(first, gradient * min(limit / size, 1.0), rtol=1e-3, atol=1e-9)


def test_norm_weights_move_in_bf16_arithmetic():
    """At 1.0 bfloat16 has steps of 0.0078, so a weight kept in it never moves by 6e-4."""
    accelerator = Accelerator(cpu=True)
    model: Any = drafter(0)
    model.autocast = torch.bfloat16
    optimizer: Any = make_optimizer(model, TrainConfig(learning_rate=6e-4))
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        backward(accelerator, model, forward(model))
        optimizer_step(accelerator, model, optimizer, 1.0)
    norms = {n: p for n, p in model.named_parameters() if p.dim() == 1}
    assert len(norms) == 2 + 2 * 4
    for key, weight in norms.items():
        assert weight.dtype == torch.float32
        moved = (weight - 1).abs().max()
        assert 5e-4 < moved < 2e-3, key
