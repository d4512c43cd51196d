"""The table that tells at a look, in Markdown and in LaTeX."""

import re

import pytest

from eval.results import validate_results
from eval.tables import aligned, latex, overview_markdown, tex_escaped
from tests.test_eval_report import RESULTS, changed, make_results, make_row


def math500(**changes: object) -> dict:
    rows = [row | {"dataset": "math500"} for row in RESULTS["rows"][:4]]
    return validate_results(RESULTS | {"rows": rows} | changes)


def test_overview_is_data_sets_by_decoders() -> None:
    lines = overview_markdown(RESULTS).splitlines()
    assert lines[0] == "| tau [95 %] | DFlash | DDTree 4 | DDTree 16 |"
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| math", "| chat", "| few"]
    row = RESULTS["rows"][7]  # chat, 16 nodes
    assert lines[3].endswith("| {:.2f} [{:.2f}, {:.2f}] |".format(row["tau"], *row["ci95"]))
    assert lines[4].count("†") == 3  # 6 prompts
    assert lines[-1] == "† fewer than 200 rounds or 8 prompts"


def test_overview_has_the_published_numbers_below_ours() -> None:
    lines = overview_markdown(math500()).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| math500",
        "| math500, DFlash paper",
        "| math500, DDTree paper",
    ]
    assert lines[4] == "| math500, DDTree paper | 7.79 | - | 8.61 |"


def test_overview_leaves_out_what_is_wrong_or_missing() -> None:
    rows = [row for row in RESULTS["rows"] if (row["dataset"], row["budget"]) != ("chat", 4)]
    rows = [
        row | {"lossless": False, "speedup": None} if row["dataset"] == "few" else row
        for row in rows
    ]
    lines = overview_markdown(RESULTS | {"rows": rows}).splitlines()
    assert len(lines) == 4
    assert lines[3].split(" | ")[2] == "-"
    assert overview_markdown(RESULTS | {"rows": []}) == ""
    assert "Nothing to show" in latex(RESULTS | {"rows": RESULTS["rows"][:1]})  # plain alone


def test_latex_table_has_the_numbers_and_says_what_they_are() -> None:
    text = latex(math500())
    row = RESULTS["rows"][2]
    assert r"${:.2f}_{{[{:.2f},\,{:.2f}]}}$".format(row["tau"], *row["ci95"]) in text
    assert r"Data set & DFlash & DDTree 4 & DDTree 16 \\" in text
    assert r"\quad\emph{DDTree paper} & $7.79$ & -- & $8.61$ \\" in text
    caption = next(line for line in text.splitlines() if line.startswith(r"\caption"))
    for words in ("Qwen3-8B", "step 200", "greedy", "bonus token included", r"95\,\%"):
        assert words in caption
    assert "dagger" not in text
    assert latex(RESULTS).count(r"^{\dagger}") == 3


def test_latex_is_balanced_whatever_the_names() -> None:
    """Every cell separator and every brace is ours: data sets and targets may be called anything."""
    results = changed(["rows", 5, "dataset"], "a&b_{100%}$\\#~^<x>")
    results["target"] = {"path": "models/50%_of{it}&more"}
    text = latex(validate_results(results))
    assert r"a\&b\_\{100\%\}\$\textbackslash{}\#\textasciitilde{}\textasciicircum{}" in text
    assert r"50\%\_of\{it\}\&more" in text
    bare = re.sub(r"\\.", "", text)
    assert bare.count("{") == bare.count("}")
    bodies = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in bodies} == {3}


@pytest.mark.parametrize("plain", ["math500", "Qwen3-8B", "step 200", "temperature 0.7"])
def test_latex_leaves_plain_names_alone(plain: str) -> None:
    assert tex_escaped(plain) == plain


def test_sampled_rows_are_named_apart() -> None:
    rows = [make_row("math", "dflash", None, 0.5), make_row("math", "dflash", None, 0.4)]
    rows[1] |= {"temperature": 0.7, "lossless": None, "speedup": None}
    text = overview_markdown(make_results(rows=rows))
    assert "| math |" in text
    assert "| math T=0.7 |" in text


def test_terminal_columns_are_aligned() -> None:
    assert aligned([["a", "tau"], ["long", "1.5"]], "<>") == "a     tau\nlong  1.5"
