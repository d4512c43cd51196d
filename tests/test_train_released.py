"""Drafter folders in other projects' layouts: what loads is the drafter that was meant, the rest is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from configs.load import UserError, load_config
from extract.head import TargetHead, save_head
from extract.manifest import TargetInfo
from tests.conftest import write_config
from tests.test_train_drafter import small_drafter
from train.build import build_drafter
from train.drafter import FULL, SLIDING, DFlashDrafter
from train.layout import load_drafter, save_drafter

# The settings of a Qwen3 config as released folders give them, for tests.test_train_drafter.small_drafter.
LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 60,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
WINDOW = {"layer_types": [SLIDING, FULL], "sliding_window": 5, "use_sliding_window": True}
TAPS = {"mask_token_id": 59, "target_layer_ids": [1, 3]}
ZLAB = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_target_layers": 6,
    **LAYERS,
}
OLD = ZLAB | {
    "block_size": 4,
    "dflash_config": TAPS,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
}
NEW = ZLAB | {"dflash_config": TAPS | {"block_size": 4}}  # Qwen3.5 on: block_size moved
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {"model_type": "qwen3", **LAYERS},
    "draft_vocab_size": 60,
    "block_size": 4,
    "aux_hidden_state_layer_ids": [2, 4],  # the hidden state before block i: tap + 1
    "mask_token_id": 59,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
}
DEEPSPEC = ZLAB | {"architectures": ["Qwen3DSparkModel"], "block_size": 4, **TAPS, "num_anchors": 512,
                   "markov_rank": 0, "enable_confidence_head": False}  # fmt: skip
GEMMA = {"input_embedding_scale": 5.5, "output_multiplier": 0.25, "final_logit_softcapping": 30.0}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in names}


def write(folder: Path, config: dict[str, Any], model: DFlashDrafter, *, prefix: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {prefix + k: v.float() for k, v in model.state_dict().items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        (OLD, {}),
        (NEW, {}),
        # written by transformers 4: no rope_parameters; Llama 3.1's own scaling
        (without(OLD, "rope_parameters") | {"rope_theta": 10000.0, "rope_scaling": None}, {}),
        (NEW | WINDOW, {"sliding": True, "causal": True}),
        (NEW | WINDOW | {"is_causal": False}, {"sliding": True}),
        (
            NEW | WINDOW | {"is_causal": True},
            {"sliding": True, "causal": True, "causal_full": True},
        ),
        (OLD | {"is_causal": True}, {"causal_full": True}),
        (OLD | {"dflash_config": TAPS | {"causal": False}} | WINDOW, {"sliding": True}),
        (OLD | GEMMA, GEMMA),
        (NEW | {"dflash_config": TAPS | GEMMA | {"block_size": 4}}, GEMMA),
        # SpecForge
        (OLD | {"dflash_config": TAPS | {"projector_type": None, "shift_label": False}}, {}),
        (SPECULATORS, {"num_target_layers": None}),
        (
            SPECULATORS | {"transformer_layer_config": {"model_type": "qwen3", **LAYERS, **WINDOW}},
            {"num_target_layers": None, "sliding": True, "causal": True},
        ),
        (
            SPECULATORS
            | {"transformer_layer_config": {"model_type": "qwen3", **LAYERS, **WINDOW}}
            | {"sliding_window_non_causal": True},
            {"num_target_layers": None, "sliding": True},
        ),
        (
            OLD | {"dflash_config": TAPS | {"sample_from_anchor": True}},
            {"sample_from_anchor": True},
        ),
        (
            SPECULATORS | {"sample_from_anchor": True},
            {"num_target_layers": None, "sample_from_anchor": True},
        ),
        # a DeepSpec drafter samples from the anchor unless it says otherwise
        (DEEPSPEC, {"sample_from_anchor": True}),
        (DEEPSPEC | {"sample_from_anchor": False}, {}),
    ],
)
def test_a_released_layout_loads_as_what_it_is(tmp_path, config, meant):
    depth = {k: v for k, v in meant.items() if k == "num_target_layers"}
    model = small_drafter(**{k: v for k, v in meant.items() if k != "num_target_layers"})
    got = load_drafter(write(tmp_path, config, model))
    assert got.shape == replace(model.shape, **depth)
    assert got.config.layer_types == model.config.layer_types
    assert got.config.sliding_window == model.config.sliding_window
    assert got.config.rope_parameters["rope_theta"] == 10000.0
    for name, value in model.float().state_dict().items():
        assert torch.equal(got.state_dict()[name], value), name


def test_speculators_copies_of_the_targets_tables_are_left_out(tmp_path):
    """Older ones carry the verifier's embedding, head and norm, which their own loader overwrites."""
    model = small_drafter().float()
    folder = write(tmp_path, SPECULATORS, model)
    copies = {
        n: torch.ones(2, 2)
        for n in ("embed_tokens.weight", "lm_head.weight", "verifier_norm.weight")
    }
    save_file(model.state_dict() | copies, folder / "model.safetensors")
    assert load_drafter(folder).state_dict().keys() == model.state_dict().keys()
    (folder / "config.json").write_text(json.dumps(OLD))
    with pytest.raises(ValueError, match=r"unexpected.*embed_tokens"):  # an embedding of its own
        load_drafter(folder)


def test_weights_in_several_files_and_under_a_prefix(tmp_path):
    model = small_drafter().float()
    folder = write(tmp_path, OLD, model, prefix="model.")
    assert torch.equal(load_drafter(folder).fc.weight, model.fc.weight)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_drafter(folder)
    state = model.state_dict()
    parts = {"a.safetensors": list(state)[::2], "b.safetensors": list(state)[1::2]}
    for file, names in parts.items():
        save_file({n: state[n] for n in names}, folder / file)
    index = {"weight_map": {n: file for file, names in parts.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_drafter(folder).norm.weight, model.norm.weight)


DFLASH_2 = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OLD | {"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
        (NEW | {"dflash_config": TAPS | DFLASH_2}, "DFlash 2"),
        (SPECULATORS | {"speculators_model_type": "dflash2"}, "DFlash 2"),
        (SPECULATORS | {"speculators_model_type": "eagle3"}, "type eagle3"),
        (OLD | {"architectures": ["Qwen3ForCausalLM"]}, "architecture"),
        (DEEPSPEC | {"sample_from_anchor": False, "markov_rank": 256}, "markov_rank=256"),
        (OLD | {"dflash_config": TAPS | {"projector_type": "domino"}}, "projector_type"),
        (OLD | {"dflash_config": TAPS | {"attention_sink_bias": True}}, "attention sinks"),
        (OLD | {"dflash_config": TAPS | {"use_swa": True, "swa_window_size": 64}}, "use_swa"),
        (OLD | {"dflash_config": TAPS | {"tap_mixer": "gated"}}, "not known here: tap_mixer=gated"),
        (OLD | {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        (OLD | {"is_neox_style": False}, "interleaved"),
        (SPECULATORS | {"draft_vocab_size": 30}, "reduced vocabulary"),
        (SPECULATORS | {"aux_hidden_state_layer_ids": [0, 4]}, "embedding"),
        (SPECULATORS | {"target_hidden_size": 64}, "target_hidden_size"),
        (without(OLD, "block_size", "num_target_layers"), "lacks block_size, num_target_layers"),
        (without(OLD, "rope_parameters"), "rope_theta"),
        (OLD | {"dflash_config": TAPS | {"target_layer_ids": [1, 6]}}, "outside the target's 6"),
        (NEW | WINDOW | {"sliding_window": 3}, "window of 3, shorter than its block of 4"),
        (NEW | WINDOW | {"use_sliding_window": False}, "no window"),
        (OLD | {"layer_types": ["linear_attention", FULL]}, "linear_attention"),
        (OLD | {"num_hidden_layers": 3}, "does not fit.*layers.2"),
        (OLD | {"dflash_config": TAPS | {"target_layer_ids": [1, 2, 3]}}, "fc.weight is .32, 64. and should be .32, 96."),
    ],
)  # fmt: skip
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, config, message):
    folder = write(tmp_path, config, small_drafter())
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_a_mask_embedding_of_its_own_is_refused(tmp_path):
    folder = write(tmp_path, OLD, small_drafter())
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
        load_drafter(folder)


# --- continuing from one ----------------------------------------------------------------------------------------------


@pytest.fixture
def experiment(tmp_path, tiny_target):
    """(settings -> config, manifest) of an experiment that fits a released folder `start` of small_drafter's shape."""
    states = tmp_path / "run" / "states"
    states.mkdir(parents=True)
    table = torch.ones(60, 32)
    save_head(TargetHead(table, table, scale=5.5, soft_cap=30.0), states, torch.float32)
    manifest: Any = SimpleNamespace(
        target_layer_ids=(1, 3),
        mask_token_id=59,
        num_target_layers=6,
        hidden_size=32,
        data_fingerprint="da7a",
        target=TargetInfo(id="target", revision=None, fingerprint="f00d"),
        enable_thinking=None,
    )

    def config(**sections: Any) -> Any:
        drafter = {
            "block_size": 4, "num_layers": 2, "target_layer_ids": [1, 3], "mask_token_id": 59,
            "init_from": str(tmp_path / "start"), **sections.pop("drafter", {}),
        }  # fmt: skip
        return load_config(
            write_config(tmp_path / "config.yaml", tiny_target, drafter=drafter, **sections)
        )

    return config, manifest


@pytest.mark.parametrize("released", [OLD | GEMMA, SPECULATORS, NEW | WINDOW])
def test_training_goes_on_from_a_released_folder(tmp_path, experiment, released):
    config, manifest = experiment
    model = small_drafter().float()
    write(tmp_path / "start", released, model)
    got = build_drafter(config(), manifest)
    assert torch.equal(got.fc.weight, model.fc.weight)
    assert got.shape.num_target_layers == 6  # the speculators layout does not say
    wanted = GEMMA["input_embedding_scale"] if released == OLD | GEMMA else 1.0
    assert got.shape.input_embedding_scale == wanted  # the drafter's own way with the table
    assert got.origin["target"]["fingerprint"] == "f00d"
    save_drafter(got, got.state_dict(), tmp_path, torch.float32)
    assert load_drafter(tmp_path).shape == got.shape


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"drafter": {"block_size": 8}}, "block size 4 and 2 layers, the config says 8 and 2"),
        ({"drafter": {"head_dim": 16}}, "head_dim is 16 but .* has 8"),
        (
            {"drafter": {"sliding_layers": [1], "sliding_window": 16}},
            r"sliding_(layers|window) is .* remove it",
        ),
        (
            {"extract": {"store_last_hidden": True}, "train": {"distillation": 0.5}},
            "final_logit_softcapping None and the target 30.0",
        ),
    ],
)
def test_a_setting_that_the_released_folder_overrules_is_an_error(
    tmp_path, experiment, sections, message
):
    config, manifest = experiment
    write(tmp_path / "start", OLD, small_drafter())
    with pytest.raises(UserError, match=message):
        build_drafter(config(**sections), manifest)


def test_a_new_drafter_uses_the_tables_as_its_target_does(experiment):
    config, manifest = experiment
    got = build_drafter(config(drafter={"init_from": None}), manifest)
    assert (got.shape.input_embedding_scale, got.shape.final_logit_softcapping) == (5.5, 30.0)
