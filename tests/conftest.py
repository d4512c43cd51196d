"""A tiny real target for the tests: a random Qwen3 or Llama with a byte-level tokenizer and a ChatML template."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "def add(a, b): return a + b",
    "one two three four five",
]
QUESTIONS = ["How are you?", "Add 2 and 3.", "Name a colour.", "Write a loop.", "What is a fox?", "Count to five.",
             "Say hello.", "Why is the sky blue?"]  # fmt: skip


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved_0|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=specials,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def make_target(
    folder: Path,
    *,
    family: str = "qwen3",
    layers: int = 6,
    seed: int = 0,
    shard_size: str = "50GB",
    **overrides: Any,
) -> Path:
    """Save a random target whose weights are large enough that its greedy answers vary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 1024,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
        **overrides,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.uniform_(0.7, 1.3)
        # a trained model never says a padded row, which is where the mask token lies
        model.get_output_embeddings().weight[len(tokenizer) :] = 0
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def write_prompts(path: Path, questions: Sequence[str]) -> Path:
    rows = [
        {"id": f"q{i}", "messages": [{"role": "user", "content": q}]}
        for i, q in enumerate(questions)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def write_config(path: Path, target_folder: Path, **sections: dict[str, Any]) -> Path:
    """A complete experiment on the tiny target, float32 throughout; `sections` update it."""
    config: dict[str, Any] = {
        "run_dir": str(path.parent / "run"),
        "target": {"path": str(target_folder), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": [str(write_prompts(path.parent / "train.jsonl", QUESTIONS))],
            "max_new_tokens": 24,
            "batch_size": 4,
        },
        "drafter": {"block_size": 4, "num_layers": 2, "target_layer_ids": [1, 3, 4]},
        "extract": {"storage_dtype": "float32", "shard_tokens": 128, "batch_tokens": 256},
        "train": {
            "max_length": 96,
            "batch_size": 2,
            "anchors": 16,
            "epochs": 2,
            "precision": "fp32",
            "log_every": 1,
        },
        "eval": {
            "prompts": [
                str(write_prompts(path.parent / "held.jsonl", ["Hello?", "What now?", "Why?"]))
            ],
            "budgets": [2, 8, 20],
            "max_new_tokens": 20,
            "dtype": "float32",
        },
        "tracking": {"wandb": "disabled"},
    }
    for name, values in sections.items():
        config.setdefault(name, {}).update(values)
    path.write_text(yaml.safe_dump(config))
    return path


def family(pid: int) -> list[int]:
    """A process and all below it: torchrun's workers have sessions of their own."""
    table = subprocess.check_output(["ps", "-e", "-o", "pid=,ppid="], text=True).splitlines()
    rows = (line.split() for line in table)
    parents = {int(child): int(parent) for child, parent in rows}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def apt_install(*packages: str) -> None:
    """Install Debian packages that a test needs, or skip the test where that cannot be done."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"{', '.join(packages)} are not installed, and this is not root on Debian")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "-q", *command], env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"apt-get {command[0]} failed: {done.stderr.strip()[-200:]}")


def tiny_drafter(target: Any, block_size: int) -> Any:
    """One random layer for the tiny target, the same whenever it is asked for."""
    from train.drafter import FULL, DFlashDrafter, DraftShape, drafter_config

    drafter = DFlashDrafter(
        drafter_config(target.config, num_hidden_layers=1, layer_types=[FULL]),
        DraftShape(
            block_size=block_size, mask_token_id=3, target_layer_ids=(1, 3), num_target_layers=6
        ),
    )
    drafter.reset_parameters(0)
    return drafter
