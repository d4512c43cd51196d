"""Faults that bit others in training (docs/field-bugs.md) and that no other test here would show."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor

from configs.load import UserError, load_config
from configs.schema import Config, TargetConfig, TrainConfig
from extract.head import TargetHead, head_of, save_head
from extract.shards import Sample, ShardReader
from extract.target import Target, load_target
from tests.conftest import write_config
from tests.test_extract_shards import manifest_of, run_in_fork, store
from tests.test_train_blocks import packed_batch, sizes
from train.batches import Schedule, collate
from train.blocks import dense_mask, layer_masks, sight, sparse_mask
from train.build import build_drafter
from train.checkpoint import load_checkpoint, save_checkpoint
from train.drafter import FULL, SLIDING, DFlashDrafter
from train.finished import complete_checkpoints
from train.optimizer import learning_rate_factor, make_optimizer, set_learning_rate
from train.startup import check_states, require_same_run, run_identity
from train.step import loss_of, prepare, run_drafter

IDS = (1, 3, 4)
MADE: dict[str, Any] = {"target_layer_ids": IDS, "hidden_size": 64, "num_target_layers": 6, "vocab_size": 320,
                        "mask_token_id": 300}  # fmt: skip


@pytest.fixture(scope="module")
def bare(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's folder without its weights."""
    folder = tmp_path_factory.mktemp("bare") / "target"
    shutil.copytree(tiny_target, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    assert not list(folder.glob("*.safetensors"))
    return folder


@pytest.fixture
def config(tmp_path: Path, bare: Path) -> Config:
    states = tmp_path / "run" / "states"
    states.mkdir(parents=True)
    table = torch.zeros(320, 64)
    save_head(TargetHead(table, table), states, torch.float32)
    return load_config(write_config(tmp_path / "config.yaml", bare))


def changed(config: Config, section: str, **values: Any) -> Config:
    new = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: new})


def build(config: Config) -> DFlashDrafter:
    return build_drafter(config, manifest_of((), **MADE))


def test_the_layers_are_those_of_the_states_whatever_the_drafters_depth(config: Config) -> None:
    """A7, and C11: the drafter is built from the target's config.json alone, its weights are not here."""
    for depth in (1, 2, 3):
        own = changed(config, "drafter", num_layers=depth, target_layer_ids=None)
        drafter = build(own)
        assert drafter.shape.target_layer_ids == IDS and len(drafter.layers) == depth
        assert drafter.shape.mask_token_id == 300 and drafter.fc.in_features == 3 * 64


def test_states_of_other_layers_are_refused_with_both_lists(config: Config, tmp_path: Path) -> None:
    """A1: also when somebody has edited the manifest's list; a count of taps has to agree too."""
    reader = ShardReader(store(tmp_path / "states"))  # made with [1, 8]
    folder = reader.folder
    stored = changed(config, "extract", storage_dtype="bfloat16")
    check_states(changed(stored, "drafter", target_layer_ids=(1, 8)), reader, folder)
    check_states(changed(stored, "drafter", target_layer_ids=None, num_taps=2), reader, folder)
    with pytest.raises(UserError, match=r"target_layer_ids=\[1, 8\], the config says \[1, 9\]"):
        check_states(changed(stored, "drafter", target_layer_ids=(1, 9)), reader, folder)
    with pytest.raises(UserError, match=r"2 taps, drafter.num_taps is 5"):
        check_states(changed(stored, "drafter", target_layer_ids=None), reader, folder)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_optimizer_holds_the_drafter_and_nothing_else(config: Config, optimizer: Any) -> None:
    """C10: no parameter of the target, each of the drafter once, all of them float32."""
    drafter = build(config)
    made = make_optimizer(drafter, TrainConfig(optimizer=optimizer))
    held = [p for group in made.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in drafter.parameters()}
    assert sum(p.numel() for p in held) == sum(p.numel() for p in drafter.parameters())
    assert {p.dtype for p in held} == {torch.float32}


def test_the_learning_rate_is_a_function_of_the_step(config: Config) -> None:
    """D19: linear warm-up, one step at the full rate, a cosine to 0; every group keeps its own rate's share."""
    cosine = [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    factors = [learning_rate_factor(step, 10, 0.2) for step in range(10)]
    assert factors == pytest.approx([1 / 3, 2 / 3, *cosine])
    assert learning_rate_factor(10, 10, 0.2) == pytest.approx(0)
    assert [learning_rate_factor(0, n, 0.0) for n in (1, 5)] == [1.0, 1.0]
    options = TrainConfig(optimizer="muon", learning_rate=0.02, muon_adamw_learning_rate=1e-3)
    optimizer = make_optimizer(build(config), options)
    for factor in (0.5, 1.0, 0.25):  # no step depends on the one before
        assert set_learning_rate(optimizer, factor) == 0.02 * factor
        assert [group["lr"] for group in optimizer.param_groups] == [0.02 * factor, 1e-3 * factor]


def test_the_optimizer_has_the_configs_figures(config: Config) -> None:
    """Each of them away from the default of torch and of ours."""
    figures: dict[str, Any] = {"learning_rate": 0.02, "betas": (0.7, 0.8), "weight_decay": 0.03}
    (adamw,) = make_optimizer(build(config), TrainConfig(**figures)).param_groups
    both = TrainConfig(
        **figures, optimizer="muon", muon_momentum=0.6, muon_adamw_learning_rate=0.01
    )
    matrices, vectors = make_optimizer(build(config), both).param_groups
    assert {p.dim() for p in matrices["params"]} == {2} and {
        p.dim() for p in vectors["params"]
    } == {1}
    assert (matrices["lr"], matrices["momentum"], matrices["weight_decay"]) == (0.02, 0.6, 0.03)
    for group, rate in ((adamw, 0.02), (vectors, 0.01)):
        assert (group["lr"], group["betas"], group["weight_decay"]) == (rate, (0.7, 0.8), 0.03)


@pytest.mark.parametrize("sliding", [{}, {"sliding_layers": (1,), "sliding_window": 7}])
@pytest.mark.parametrize("causal", [False, True])
def test_the_drafters_masks_are_the_configs(
    config: Config, sliding: dict[str, Any], causal: bool
) -> None:
    """Of layer 1 alone: its window, and in it no sight of later slots."""
    wanted = changed(config, "drafter", **sliding, causal_sliding=causal and bool(sliding))
    drafter = build(wanted)
    assert drafter.config.layer_types == [FULL, SLIDING if sliding else FULL]
    document, anchors = torch.zeros(1, 30, dtype=torch.long), torch.tensor([[20]])
    masks = layer_masks(drafter, document, torch.arange(30)[None], anchors)
    slots = {kind: mask[0, 0].tolist() for kind, mask in masks.items() if isinstance(mask, Tensor)}
    everything = [i < 20 for i in range(30)] + 4 * [True]
    assert slots.pop(FULL) == 4 * [everything]
    for slot, seen in enumerate(slots.pop(SLIDING, [])):
        assert seen[:30] == [20 + slot - 7 < i < 20 for i in range(30)]
        assert seen[30:] == [not causal or other <= slot for other in range(4)]
    assert not slots


@pytest.mark.parametrize(
    "change",
    [{"learning_rate": 1e-5}, {"weight_decay": 0.1}, {"betas": (0.9, 0.99)}, {"max_grad_norm": 0.5}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_resumed_run_cannot_change_the_optimisation(
    config: Config, change: dict[str, Any]
) -> None:
    """D22: there is no precedence to get wrong, both identities are named."""
    schedule = Schedule([[0], [1]], 2, 1, 1, 1, 0)
    saved, here = {"identity": run_identity(config, schedule)}, Path("checkpoints/step-000005")
    require_same_run(saved, config, schedule, here)
    require_same_run(saved, changed(config, "train", log_every=7), schedule, here)
    with pytest.raises(UserError, match=r"step-000005 was trained with other .*drafter.init_from="):
        require_same_run(saved, changed(config, "train", **change), schedule, here)
    with pytest.raises(UserError, match="rows per step"):
        require_same_run(saved, config, Schedule([[0], [1]], 2, 1, 2, 1, 0), here)


def test_a_mask_is_one_for_all_heads() -> None:
    """C8: [rows, 1, slots, keys], dense and sparse."""
    _, document, position, anchors = packed_batch(0)
    rows, slots, keys = sizes(document, anchors, 4)
    rule, cpu = sight(document, position, anchors, 4), torch.device("cpu")
    assert dense_mask(rule, rows, slots, keys, cpu).shape == (rows, 1, slots, keys)
    assert sparse_mask(rule, rows, slots, keys, cpu).shape == (rows, 1, slots, keys)


def live_sample(target: Target, number: int, length: int = 20) -> Sample:
    """A sample as it comes from the target, not from the disk."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(5, 250, (length,), generator=generator)
    features, last = target.forward_taps(ids[None], IDS)
    mask = (torch.arange(length) >= length // 3).to(torch.uint8)
    return Sample(f"s{number}", ids.int(), mask, features[0], last[0])


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target), dtype="float32", device="cpu"))


def gradients(config: Config, target: Target, rows: list[list[tuple[int, Sample]]]) -> Any:
    """Gradients of the summed loss of these rows."""
    batch = collate(
        rows, [0] * len(rows), max_length=40, feature_size=3 * 64, feature_dtype=torch.float32,
        hidden_size=64, seed=0,
    )  # fmt: skip
    drafter, head = build(config), head_of(target)
    part = prepare(batch, config, drafter.shape)
    numerator, _ = loss_of(run_drafter(drafter, drafter, head, part), head, part, config)
    assert torch.isfinite(numerator)
    numerator.backward()
    return {name: p.grad for name, p in drafter.named_parameters()}


def test_live_states_embedding_and_head_can_be_trained_on(config: Config, target: Target) -> None:
    """A24: nothing that the target gives is an inference tensor, which backward refuses."""
    kl = changed(config, "train", distillation=0.5)
    found = gradients(kl, target, [[(0, live_sample(target, 0))]])
    assert all(g is not None and bool(g.any()) for g in found.values())
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())


def test_rows_without_an_anchor_leave_the_gradient_of_the_others_alone(
    config: Config, target: Target
) -> None:
    """B12: an empty row, a row whose only supervised token is its last, and a packed neighbour (C15) beside it."""
    good = (0, live_sample(target, 0))
    lone = live_sample(target, 1)
    lone.loss_mask[:-1] = 0
    alone = gradients(config, target, [[good]])
    together = gradients(config, target, [[good], [], [(1, lone)]])
    packed = gradients(config, target, [[(1, lone), good]])
    for name, wanted in alone.items():
        torch.testing.assert_close(together[name], wanted, rtol=1e-4, atol=1e-6, msg=name)
        torch.testing.assert_close(packed[name], wanted, rtol=1e-4, atol=1e-6, msg=name)


# ---- checkpoints


class Run:
    """A drafter and its AdamW, prepared as training prepares them, and their checkpoints."""

    def __init__(self, config: Config) -> None:
        self.accelerator = Accelerator(cpu=True)
        drafter: Any = build(config)
        drafter.autocast = torch.bfloat16
        optimizer: Any = make_optimizer(drafter, config.train)
        self.model, self.optimizer = self.accelerator.prepare(drafter, optimizer)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for p in self.model.parameters():
                p.grad = torch.full_like(p, 0.01)
            self.optimizer.step()

    def save(self, folder: Path, step: int) -> Path:
        return save_checkpoint(
            folder, self.accelerator, self.model, self.optimizer, step=step, card="", trainer={}, keep=2
        )  # fmt: skip

    def load(self, checkpoint: Path) -> None:
        load_checkpoint(checkpoint, self.accelerator, self.model, self.optimizer)


def test_norm_weights_move_and_go_on_moving_after_a_resume(config: Config, tmp_path: Path) -> None:
    """C5: 100 steps of 6e-4 are 0.06; bfloat16 has no number between 1 and 1.0078, so it would stay at 1."""
    settings = changed(config, "train", learning_rate=6e-4, precision="bf16")
    first = Run(settings)
    first.train(100)
    checkpoint = first.save(tmp_path, 100)
    again = Run(settings)
    again.load(checkpoint)
    for run, moved in ((first, 0.06), (again, 0.06), (again, 0.12)):
        norms = [p for p in run.model.parameters() if p.dim() == 1]
        assert len(norms) == 2 * 4 + 2 and all(p.dtype == torch.float32 for p in norms)
        for p in norms:
            torch.testing.assert_close(1 - p, torch.full_like(p, moved), rtol=0.02, atol=0)
        moments = again.optimizer.state_dict()["state"].values()
        assert {m[name].dtype for m in moments for name in ("exp_avg", "exp_avg_sq")} == {
            torch.float32
        }
        if run is again:
            again.train(100)


def test_a_checkpoint_is_the_drafter_alone(config: Config, tmp_path: Path) -> None:
    """D8, C14, D23: 2 bytes a parameter for engines and 12 to go on from; one name a tensor, none of the target's."""
    run = Run(config)
    run.train(1)
    folder = run.save(tmp_path, 1)
    parameters = sum(p.numel() for p in run.model.parameters())
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    names = dict(run.model.named_parameters())
    assert 14 * parameters < size < 14 * parameters + 2000 * len(names)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(names)
    state = torch.load(folder / "resume" / "state.pt", weights_only=True)
    assert set(state["model"]) == set(names)
    assert not any(
        part in name for name in names for part in ("embed", "lm_head", "_orig_mod", "module.")
    )
    files = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    assert run.save(tmp_path, 1) == folder  # D15b: the last step may also be a scheduled one
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == files


def test_a_kill_at_any_step_of_a_save_leaves_whole_checkpoints(
    config: Config, tmp_path: Path
) -> None:
    """D15: before each flush, rename and deletion. What counts as complete is whole, and the next save goes through."""
    run = Run(config)
    run.train(1)
    for step in (1, 2):
        run.save(tmp_path / "before", step)
    whole = contents(run.save(tmp_path / "alone", 3))

    def dies_at(count: int, folder: Path) -> None:
        steps = 0

        def stepping(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                nonlocal steps
                if steps == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                steps += 1
                return function(*arguments, **options)

            return wrapped

        for owner, name in (
            (os, "fsync"),
            (Path, "rename"),
            (Path, "touch"),
            (Path, "unlink"),
            (shutil, "rmtree"),
        ):
            setattr(owner, name, stepping(getattr(owner, name)))
        run.save(folder, 3)

    seen: list[list[int]] = []
    code = -1
    while code != 0:
        folder = tmp_path / f"killed-{len(seen)}"
        shutil.copytree(tmp_path / "before", folder)
        code = run_in_fork(partial(dies_at, len(seen), folder))
        assert code in (0, -signal.SIGKILL)
        complete = complete_checkpoints(folder)
        seen.append([int(c.name.removeprefix("step-")) for c in complete])
        for checkpoint in complete:
            assert {*contents(checkpoint)} == {*whole}
            run.load(checkpoint)
            if checkpoint.name == "step-000003":
                assert contents(checkpoint) == whole
        run.save(folder, 3)
        assert [c.name for c in complete_checkpoints(folder)][-1] == "step-000003"
        assert not list(folder.glob("checkpoints/.*")) and len(complete_checkpoints(folder)) <= 3
    assert len(seen) > 10 and seen == sorted(seen, key=[[1, 2], [1, 2, 3], [2, 3]].index)
    assert seen[0] == [1, 2] and seen[-1] == [2, 3]


def contents(checkpoint: Path) -> dict[str, bytes]:
    files = (file for file in checkpoint.rglob("*") if file.is_file())
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in files}


@pytest.mark.slow
@pytest.mark.parametrize(("given", "status"), [(1, 1), (4, 0), ("auto", 0)])
def test_accumulation_is_what_the_config_says_or_refused(
    tmp_path: Path, tiny_target: Path, given: object, status: int
) -> None:
    """D17: libraries let one of three places win. D20: every `auto` is filled in before DeepSpeed sees it."""
    file = write_config(tmp_path / "c.yaml", tiny_target, train={"gradient_accumulation_steps": 4})
    wanted = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": given,
              "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(wanted))
    code = (
        "import sys; from configs.load import load_config; from train.startup import make_accelerator; "
        "a = make_accelerator(load_config(sys.argv[1])); p = a.state.deepspeed_plugin.deepspeed_config; "
        "print(p['gradient_accumulation_steps'], p['train_micro_batch_size_per_gpu'], p['gradient_clipping'])"
    )
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json"),
        "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    if status:
        assert "accumulation_steps is 4 but the DeepSpeed config says 1" in done.stderr
    else:
        assert done.stdout.strip().splitlines()[-1] == "4 2 1.0"
