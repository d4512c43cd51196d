"""Faults that bit others in extraction (docs/field-bugs.md) and that no other test here would show."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import extract.main
from configs.load import UserError, load_config
from configs.provenance import file_sha256
from configs.schema import TargetConfig
from extract.head import FILE, TargetHead, head_of, load_head, save_head
from extract.manifest import TargetHead as HeadEntry
from extract.sample import Format, defect_of
from extract.target import Target, load_target
from tests.conftest import make_target, write_config
from tests.test_extract_prompts import assistant, user, write
from tests.test_extract_shards import HIDDEN, TAPS, flip, make_sample, store


def load(folder: Path) -> Target:
    return load_target(TargetConfig(path=str(folder), dtype="float32", device="cpu"))


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_not_in_the_files_are_not_made_up(tmp_path: Path, tied: bool) -> None:
    """C2: transformers initialises what it does not find at random and only warns."""
    folder = make_target(tmp_path, layers=2, tie_word_embeddings=tied)
    file = folder / "model.safetensors"
    weights = load_file(file)
    assert ("lm_head.weight" in weights) != tied
    head = head_of(load(folder))
    assert torch.equal(head.embedding, weights["model.embed_tokens.weight"])
    assert (head.weight is head.embedding) == tied
    lost = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
    for name in lost if tied else [*lost, "lm_head.weight"]:
        rest = {key: value for key, value in weights.items() if key != name}
        save_file(rest, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=r"lack .* of its weights; download the model again"):
            load(folder)


def test_only_tapped_states_stay_in_memory(tmp_path: Path) -> None:
    """A15: of 24 blocks' outputs the three tapped ones live on, beside the one that the next block reads."""
    target = load(make_target(tmp_path, layers=24))
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def note(module: Any, args: Any, out: Any) -> None:
        made.append(weakref.ref(out if torch.is_tensor(out) else out[0]))
        alive.append(sum(ref() is not None for ref in made))

    for layer in target.layers:
        layer.register_forward_hook(note)
    features, _ = target.forward_taps(torch.arange(5, 25)[None], (1, 3, 4), use_cache=False)
    assert features.shape == (1, 20, 3 * 64)
    assert len(alive) == 24 and max(alive) <= 3 + 2, alive


def test_negative_and_unordered_layers_are_refused(tmp_path: Path, tiny_target: Path) -> None:
    """A16: -1 means another layer to every library."""
    file = write_config(tmp_path / "config.yaml", tiny_target)
    for ids in ("[-1]", "[-1, 3, 4]", "[4, 3, 1]", "[3, 3, 4]", "[]"):
        with pytest.raises(UserError, match="must be increasing layer ids from 0 on"):
            load_config(file, [f"drafter.target_layer_ids={ids}"])


def test_a_mask_token_that_stands_in_a_chat_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    """B13: the drafter could not tell a real token from an unknown slot."""
    rows = [{"id": "c", "messages": [user("what is <|reserved_0|>?"), assistant("a fox")]}]
    settings: dict[str, Any] = {
        "data": {"prompts": [write(tmp_path / "chats.jsonl", rows)], "regenerate": False},
        "drafter": {"mask_token_id": 3},  # <|reserved_0|>
        "eval": {"prompts": []},
    }
    file = write_config(tmp_path / "config.yaml", tiny_target, **settings)
    with pytest.raises(UserError, match=r"the mask token 3 stands in chat c#0"):
        extract.main.main(["--config", str(file)])
    assert not list((tmp_path / "run").glob("states/shard-*"))


def test_a_flipped_bit_in_the_head_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    """D6: every logit of training and evaluation hangs on the frozen embedding and head."""
    generator = torch.Generator().manual_seed(0)
    table, weight = torch.randn(2, 300, 8, generator=generator).unbind()
    save_head(TargetHead(table, weight), tmp_path, torch.float32)
    good = file_sha256(tmp_path / FILE)
    store(tmp_path, target_head=HeadEntry(file=FILE, sha256=good))
    head = load_head(tmp_path)
    assert torch.equal(head.embedding, table) and torch.equal(head.weight, weight)
    flip(tmp_path / FILE, -40)
    with pytest.raises(UserError, match=r"cannot read .*sha256 is \w+ and the manifest says"):
        load_head(tmp_path)


def test_a_row_too_few_is_a_defect_with_both_lengths() -> None:
    """A11: of states, last states and mask alike; nothing is trimmed to fit."""
    form = Format(TAPS, HIDDEN, torch.bfloat16, True)
    sample = make_sample("a", 7, last=True)
    assert sample.last_hidden is not None and defect_of(sample, form) is None
    for short in (
        replace(sample, hidden_states=sample.hidden_states[:-1]),
        replace(sample, last_hidden=sample.last_hidden[:-1]),
        replace(sample, loss_mask=sample.loss_mask[:-1]),
    ):
        assert "has shape [6" in str(defect := defect_of(short, form)), defect
        assert "7 tokens need [7" in str(defect), defect
