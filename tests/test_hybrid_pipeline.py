"""The same pipeline on targets that published code cannot draft for losslessly: sliding windows and Gated DeltaNet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from configs.load import load_config
from eval.decode import decode, propose_chain, propose_tree
from eval.replay import replay
from extract.head import load_head
from extract.shards import ShardReader
from extract.target import load_target
from tests.conftest import make_target, write_config
from tests.test_eval_verify import FAMILIES
from tests.test_pipeline import run
from train.finished import complete_checkpoints
from train.layout import load_drafter

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_extract_train_and_two_evaluations_that_agree(family, tmp_path):
    target_folder = make_target(tmp_path / "target", **FAMILIES[family])
    config_file = write_config(
        tmp_path / "config.yaml",
        target_folder,
        train={"max_steps": 80, "epochs": 40, "learning_rate": 3e-3, "log_every": 40},
    )
    run("extract/main.py", "--config", str(config_file))
    run("train/main.py", "--config", str(config_file))
    assert "lossless" in run("eval/main.py", "--config", str(config_file), "--self-test")
    run("eval/main.py", "--config", str(config_file))
    run("eval/main.py", "--config", str(config_file), "--mode", "live")

    config = load_config(config_file)
    run_dir = Path(config.run_dir)
    evals = run_dir / "evals" / complete_checkpoints(run_dir)[-1].name
    live = json.loads((evals / "live" / "results.json").read_text())
    assert live["lossless_check"]["answers_that_differ"] == 0
    assert live["lossless_check"]["compared_tokens"] > 100
    taus = {
        mode: {
            (r["decoder"], r["budget"]): (r["tau"], r["histogram"])
            for r in json.loads((folder / "results.json").read_text())["rows"]
            if r["decoder"] != "autoregressive"
        }
        for mode, folder in (("replay", evals), ("live", evals / "live"))
    }
    assert taus["replay"] == taus["live"]

    # list by list, on answers that the drafter knows well enough to get several tokens right
    drafter = load_drafter(complete_checkpoints(run_dir)[-1]).eval()
    target = load_target(config.target, dtype="float32")
    reader = ShardReader(run_dir / "states")
    head = load_head(run_dir / "states", dtype=torch.float32)
    seen = set()
    for sample in (reader[i] for i in range(4)):
        first = len(sample.input_ids) - int(sample.loss_mask.sum())
        for key, got in replay(drafter, head, sample, [2, 20, 200]).items():
            propose = propose_chain if key is None else propose_tree(key)
            decoded = decode(
                target, drafter, head, sample.input_ids[:first].tolist(), propose, max_new_tokens=24
            )
            assert decoded.tokens == sample.input_ids[first:].tolist()
            assert (decoded.committed, decoded.accepted) == (got.committed, got.accepted)
            seen.update(got.accepted)
    assert len(seen) >= 3, f"only accepted lengths {seen}: the test has seen too little"
