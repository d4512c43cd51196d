"""docs/field-bugs.md: the table is whole, the tests that it names exist, and whatever has none says why.

Also that the tests exist which docs/reliability.md names.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "docs" / "field-bugs.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TABLE.splitlines()
    if re.match(r"\| [A-Z]\d", line)
]
NAMED = re.compile(r"`(tests/\w+\.py)::(\w+)`")


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_every_entry_has_a_row_of_its_own() -> None:
    ids = [row[0] for row in ROWS]
    assert Counter(ids).most_common(1)[0][1] == 1
    assert len(ids) == int(re.findall(r"^\d+", TABLE, re.M)[0]) == 101
    order = [(id[0], int(re.sub(r"\D", "", id)), id) for id in ids]
    assert order == sorted(order)
    assert Counter(id[0] for id in ids) == {"A": 22, "B": 14, "C": 14, "D": 23, "E": 6, "F": 22}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_tests_that_exist_or_a_reason(row: list[str]) -> None:
    _, kind, verdict, why = row  # four cells: no bar in a text
    assert kind and verdict in ("tested", "impossible", "not applicable", "open")
    named = NAMED.findall(why)
    assert why.count("tests/") == len(named), "a test that is not written as `tests/x.py::test_y`"
    for file, test in named:
        assert test in functions_of(file), f"{file} has no {test}"
    assert named or verdict != "tested"
    reason = re.sub(NAMED, "", why).strip(" ;,")
    assert verdict == "tested" or len(reason.split()) >= 5, "a reason is a sentence"


def test_reliability_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = NAMED.findall(text)
    assert len(named) > 40 and text.count("::test_") == len(named)
    for file, test in named:
        assert test in functions_of(file), f"{file} has no {test}"
    for row in (line for line in text.splitlines() if line.startswith("| `")):
        assert "::test_" in row
