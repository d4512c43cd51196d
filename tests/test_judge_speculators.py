"""vLLM's speculators package reads our export, and its own converter makes the same tensors of our checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.load import load_config
from extract.target import load_target
from tests.conftest import make_target, write_config
from train import export
from train.drafter import FULL, SLIDING, DFlashDrafter, DraftShape, drafter_config
from train.layout import load_drafter, save_drafter

pytestmark = [pytest.mark.judge, pytest.mark.slow]


@pytest.mark.parametrize("sliding", [False, True])
def test_speculators_reads_our_export_and_converts_our_checkpoint(tmp_path, sliding):
    folder = make_target(tmp_path / "target", tie_word_embeddings=False)
    target = load_target(load_config(write_config(tmp_path / "config.yaml", folder)).target)
    layers = (
        {"layer_types": [SLIDING, FULL], "sliding_window": 16, "use_sliding_window": True}
        if sliding
        else {}
    )
    drafter = DFlashDrafter(
        drafter_config(target.config, num_hidden_layers=2, **layers), DraftShape(4, 310, (1, 3), 6)
    )
    drafter.reset_parameters(0)
    (tmp_path / "step-000001").mkdir()
    save_drafter(drafter, drafter.state_dict(), tmp_path / "step-000001", torch.bfloat16)
    export.write(tmp_path / "step-000001", "speculators", tmp_path / "out", str(folder))
    (tmp_path / "judged").mkdir()
    subprocess.run(
        [os.environ["SPECULATORS_PYTHON"], Path(__file__).parent / "judges" / "speculators_driver.py", tmp_path / "out",
         tmp_path / "step-000001", folder, tmp_path / "judged"],
        check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip

    ours = load_file(tmp_path / "out" / "model.safetensors")
    loaded = load_file(tmp_path / "judged" / "loaded.safetensors")
    converted = load_file(tmp_path / "judged" / "converted" / "model.safetensors")
    assert converted.keys() == ours.keys() <= loaded.keys()
    for name, value in ours.items():
        assert torch.equal(loaded[name].to(value.dtype), value), name
        assert torch.equal(converted[name], value), name
    understood = json.loads((tmp_path / "judged" / "config.json").read_text())
    assert understood == {
        "block_size": 4,
        "mask_token_id": 310,
        "aux_hidden_state_layer_ids": [2, 4],
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "draft_vocab_size": 320,
        "verifier": str(folder),
        "layer_types": [SLIDING if sliding else FULL, FULL],
    }
    # And what speculators writes loads here. Its converter drops is_causal, so it says "causal" for sliding layers.
    theirs = load_drafter(tmp_path / "judged" / "converted", torch.bfloat16)
    assert theirs.shape.target_layer_ids == (1, 3) and theirs.shape.causal_sliding == sliding
    for name, value in ours.items():
        assert torch.equal(theirs.state_dict()[name], value), name
