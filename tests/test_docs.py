"""What the documentation says is so: examples run, links lead somewhere, commands parse, the file tree is the tree."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.test_extract_shards import SAMPLES, store

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("extract.shards", ["ShardReader"]),
        ("train.drafter", ["DFlashDrafter"]),
        ("eval.tree", ["build_tree"]),
        ("eval.verify", ["Verifier"]),
        ("eval.replay", ["replay"]),
    ],
)
def test_examples_in_docstrings_run(module: str, names: list[str], tmp_path: Path) -> None:
    code = importlib.import_module(module)
    tests = doctest.DocTestFinder().find(code, extraglobs={"states": tmp_path})
    store(tmp_path, SAMPLES)
    assert [t.name.removeprefix(f"{module}.") for t in tests if t.examples] == names
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert not runner.summarize().failed
