"""What ships loads: every recipe, every launch file, every file that a recipe names; no prompt is in two sets."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from configs.load import dump_config, load_config
from extract.prompts import load_chats

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
LAUNCH = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.name)
def test_recipes_load_and_name_files_that_exist(file, tmp_path):
    config = load_config(file)
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config
    for name in (*config.data.prompts, *config.eval.prompts):
        if name != "your-prompts.jsonl":
            assert load_chats([name])[0]


@pytest.mark.parametrize("file", LAUNCH, ids=lambda f: f.name)
def test_launch_files_load(file):
    assert load_config_from_file(str(file)).num_processes >= 1


def test_shipped_prompts_are_enough_and_apart():
    names = [
        "extract/prompt_sets/train.jsonl",
        *(f"eval/prompts/{n}.jsonl" for n in ("chat", "math", "code")),
    ]
    sets = {name: load_chats([name])[0] for name in names}
    assert len(sets[names[0]]) >= 400 and all(len(sets[n]) >= 24 for n in names[1:])

    def eights(chats):
        for chat in chats:
            for message in chat.messages:
                words = "".join(
                    c if c.isalnum() else " " for c in message["content"].casefold()
                ).split()
                yield from (tuple(words[i : i + 8]) for i in range(len(words) - 7))

    runs = {name: set(eights(chats)) for name, chats in sets.items()}
    for a, b in combinations(names, 2):
        assert not runs[a] & runs[b], (a, b)
