"""z-lab's own package loads our checkpoint folder unchanged and accepts what we accept, and what it writes loads here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eval.decode import Drafting, decode, propose_chain
from eval.verify import Verifier
from extract.head import head_of
from extract.prompts import Renderer
from extract.target import load_target
from tests.conftest import QUESTIONS, make_target, write_config
from tests.test_pipeline import run
from train.finished import complete_checkpoints
from train.layout import load_drafter

pytestmark = [pytest.mark.judge, pytest.mark.slow]
LIMIT = 40
FAMILY: dict[str, dict[str, Any]] = {
    "gemma3_text": {"query_pre_attn_scalar": 16, "layer_types": ["full_attention"] * 6}
}


@pytest.mark.parametrize(
    ("family", "sliding"),
    # gemma3 multiplies its embedding, which z-lab's loop leaves to the drafter's input_embedding_scale
    [("qwen3", False), ("qwen3", True), ("llama", False), ("gemma3_text", False)],
)
def test_zlab_accepts_the_same_lengths(tmp_path, family, sliding):
    from configs.load import load_config

    config_file = write_config(
        tmp_path / "config.yaml",
        make_target(tmp_path / "target", family=family, **FAMILY.get(family, {})),
        drafter={"sliding_window": 16, "sliding_layers": [0], "causal_sliding": True}
        if sliding
        else {},
        train={"max_steps": 120, "epochs": 60, "learning_rate": 3e-3, "log_every": 60},
    )
    run("extract/main.py", "--config", str(config_file))
    run("train/main.py", "--config", str(config_file))
    config = load_config(config_file)
    folder = complete_checkpoints(Path(config.run_dir))[-1]

    target = load_target(config.target)
    renderer = Renderer(target.tokenizer, enable_thinking=None)
    prompts = [renderer.prompt_ids([{"role": "user", "content": q}]) for q in QUESTIONS]
    (tmp_path / "ids.json").write_text(json.dumps(prompts))
    python = os.environ["ZLAB_PYTHON"]
    subprocess.run(
        [python, Path(__file__).parent / "judges" / "zlab_driver.py", tmp_path / "target", folder,
         tmp_path / "ids.json", str(LIMIT), tmp_path / "out.json", tmp_path / "logits.safetensors",
         tmp_path / "written"],
        check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip

    drafter, head = load_drafter(folder).eval(), head_of(target)
    written = load_drafter(tmp_path / "written")
    assert (
        written.shape == drafter.shape and written.config.layer_types == drafter.config.layer_types
    )
    for name, value in drafter.state_dict().items():
        assert torch.equal(written.state_dict()[name], value), name
    verifier, drafting = Verifier(target, drafter.shape.target_layer_ids), Drafting(drafter, head)
    logits, features = verifier.prefill(prompts[0])
    drafting.append(features)
    ours = drafting.draft(int(logits.argmax()))
    theirs = load_file(tmp_path / "logits.safetensors")["logits"]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    compared = 0
    for prompt, answer in zip(
        prompts, json.loads((tmp_path / "out.json").read_text()), strict=True
    ):
        got = decode(target, drafter, head, prompt, propose_chain, max_new_tokens=LIMIT)
        assert got.tokens == answer["tokens"]
        # Near the limit z-lab drafts shorter blocks, which in a bidirectional block changes the drafts; compare the
        # rounds whose block still fitted.
        position, fitting = 1, 0
        for committed in got.committed:
            if position - 1 + drafter.shape.block_size > LIMIT - 1:
                break
            position, fitting = position + committed, fitting + 1
        assert got.committed[:fitting] == answer["committed"][:fitting]
        compared += fitting
    assert compared >= 30
