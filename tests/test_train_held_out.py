"""The held-out measurement inside training: of which set, always the same, and leaving no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Qwen3Config

from configs.load import UserError
from configs.schema import Config
from extract.head import TargetHead
from tests.test_extract_shards import HIDDEN, manifest_of, store
from tests.test_train_loss import make_config
from train.drafter import DFlashDrafter, DraftShape
from train.held_out import TIMES, HeldOut, held_out

MANIFEST = manifest_of(())


def config(folder: Path, **train: Any) -> Config:
    """Two held-out sets, of which extraction has finished the second only."""
    made = make_config(max_length=12, batch_size=2, **train)
    sets = made.eval.model_copy(update={"prompts": ("first.jsonl", "second.jsonl")})
    for name, complete in (("first", False), ("second", True)):
        states = folder / "eval-sets" / name / "states"
        if not states.exists():
            states.parent.mkdir(parents=True)
            store(states, complete=complete)
    return made.model_copy(update={"run_dir": str(folder), "eval": sets})


def measurement(settings: Config, steps: int = 100) -> HeldOut:
    found = held_out(settings, MANIFEST, Accelerator(cpu=True), steps)
    assert found is not None
    return found


def drafter_and_head() -> tuple[DFlashDrafter, TargetHead]:
    shape = Qwen3Config(
        hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, vocab_size=300,
    )  # fmt: skip
    model = DFlashDrafter(shape, DraftShape(4, 299, (1, 8), 12))
    model.reset_parameters(0)
    table = torch.randn(300, HIDDEN, generator=torch.Generator().manual_seed(1))
    return model, TargetHead(table, table)


def test_the_first_complete_set_is_measured_and_one_of_another_target_is_refused(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path)
    assert measurement(settings).data.reader.folder == tmp_path / "eval-sets" / "second" / "states"
    other = MANIFEST.model_copy(
        update={"target": MANIFEST.target.model_copy(update={"fingerprint": "beef"})}
    )
    for wrong, said in (
        (other, 'target.fingerprint="f00d", the config says "beef"'),
        (MANIFEST.model_copy(update={"target_layer_ids": (1, 9)}), r"target_layer_ids=\[1, 8\]"),
    ):
        with pytest.raises(UserError, match=said):
            held_out(settings, wrong, Accelerator(cpu=True), 100)
    none = settings.model_copy(update={"eval": settings.eval.model_copy(update={"prompts": ()})})
    assert held_out(none, MANIFEST, Accelerator(cpu=True), 100) is None


def test_it_is_the_same_whenever_it_is_asked_for_and_for_every_objective_of_training(
    tmp_path: Path,
) -> None:
    """Cross-entropy of the same anchors; so a run with distillation can be held against one without."""
    model, head = drafter_and_head()
    plain = measurement(config(tmp_path)).values(model, head)
    again = measurement(config(tmp_path))
    assert again.values(model, head) == again.values(model, head) == plain
    assert measurement(config(tmp_path, distillation=0.7)).values(model, head) == plain
    assert not any(p.grad is not None for p in model.parameters()) and model.training
    assert set(plain) == {"held_out_loss", "held_out_tau_proxy"} and plain["held_out_loss"] > 1
    model.reset_parameters(1)
    assert again.values(model, head) != plain


@pytest.mark.parametrize(("steps", "log_every"), [(1000, 10), (1000, 7), (3, 1), (5, 100)])
def test_it_lies_on_logged_lines_and_at_most_so_many(
    tmp_path: Path, steps: int, log_every: int
) -> None:
    every = measurement(config(tmp_path, log_every=log_every), steps).every
    assert every % log_every == 0 and every > 0
    assert steps / every <= TIMES and every < steps / TIMES + log_every
