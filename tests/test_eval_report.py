"""results.json and its strict reader, the tables, and the plots, which are measured, not looked at."""

import copy
import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from configs.load import UserError
from eval.metrics import Answer, Json, Row, summarize
from eval.plots import (
    plot_acceptance_by_position,
    plot_tau_vs_budget,
    plot_tau_vs_step,
    plot_time_per_phase,
)
from eval.report import markdown, terminal_table, write_report
from eval.results import (
    invalid_rows,
    latest_results,
    read_results,
    validate_results,
    write_results,
)
from eval.tables import latex

BLOCK = 4


def make_row(
    dataset: str,
    decoder: str,
    budget: int | None,
    quality: float,
    prompts: int = 10,
    **changes: Any,
) -> Json:
    """A row of answers whose drafts are accepted with probability `quality` each."""
    rng = random.Random(f"{dataset}{decoder}{budget}{quality}")
    answers = []
    for i in range(prompts):
        accepted = []
        for _ in range(25 if i else 0):  # the first prompt's answer has no round
            accepted.append(sum(rng.random() < quality for _ in range(BLOCK - 1)))
        committed = tuple(m + 1 for m in accepted)
        tokens = 1 + sum(committed)
        spent = {"draft": 0.4, "build": 0.1, "verify": 0.9, "commit": 0.1}
        drafted = 99 * len(accepted)
        answers.append(Answer(f"p{i}", committed, tuple(accepted), tokens, spent, drafted))
    row = summarize(
        answers,
        dataset=dataset,
        decoder=decoder,
        budget=budget,
        temperature=0.0,
        block_size=BLOCK,
        lossless=None if decoder == "autoregressive" else True,
        baseline=[Answer(a.prompt_id, (), (), a.tokens, {"verify": 3.0}) for a in answers],
    )
    return row.as_dict() | changes


def make_results(step: int | None = 200, quality: float = 0.5, **changes: Any) -> Json:
    rows = [
        make_row(name, decoder, budget, q, prompts)
        for name, ease, prompts in (("math", 0.3, 12), ("chat", 0.0, 12), ("few", 0.1, 6))
        for decoder, budget, q in (
            ("autoregressive", None, 0.0),
            ("dflash", None, quality + ease - 0.2),
            ("ddtree", 4, quality + ease - 0.1),
            ("ddtree", 16, quality + ease),
        )
    ]
    results = {
        "schema": 1,
        "mode": "live",
        "checkpoint": {"path": f"runs/x/checkpoints/{step}", "step": step, "fingerprint": "abc"},
        "target": {"path": "Qwen/Qwen3-8B", "revision": "main"},
        "provenance": {"command": "python eval/main.py --config configs/x.yaml", "git": None},
        "rows": rows,
    }
    return results | changes


RESULTS = make_results()


def changed(path: Sequence[str | int], value: Any) -> Json:
    """RESULTS with one value replaced."""
    results: Any = copy.deepcopy(RESULTS)
    place = results
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return results


def without(path: Sequence[str | int]) -> Json:
    results: Any = copy.deepcopy(RESULTS)
    place = results
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return results


# results.json


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = write_results(tmp_path / "evals" / "step-000200", RESULTS)
    assert path.name == "results.json"
    assert read_results(path) == RESULTS
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


DESIGN = (  # section 7 of the design: what scripts outside rely on
    "dataset decoder budget temperature tau tau_mean_of_responses ci95 accept_at_position histogram "
    "prompts rounds tokens tokens_per_second speedup lossless reliable"
)


@pytest.mark.parametrize("key", DESIGN.split())
def test_a_row_needs_each_field_of_the_design(key: str) -> None:
    with pytest.raises(UserError, match=rf"rows\[1\]\.{key} must be .*missing"):
        validate_results(without(["rows", 1, key]))


def test_a_row_needs_no_more_than_the_design() -> None:
    rows = [{key: row[key] for key in DESIGN.split()} for row in RESULTS["rows"]]
    results = validate_results(RESULTS | {"rows": rows})
    assert "3.4" not in terminal_table(results | {"rows": []})
    assert terminal_table(results).count("\n") == 1 + len(rows)


@pytest.mark.parametrize("key", ["schema", "mode", "checkpoint", "target", "provenance", "rows"])
def test_every_part_is_needed(key: str) -> None:
    with pytest.raises(UserError, match=f"results.json: {key} must be .*missing"):
        validate_results(without([key]))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["schema"], 2, "schema must be 1, not 2"),
        (["schema"], True, "schema must be"),
        (["mode"], "dead", "mode must be replay or live or served, not 'dead'"),
        (["checkpoint", "step"], -1, "checkpoint.step"),
        (["checkpoint", "step"], "200", "checkpoint.step"),
        (["target"], "Qwen3", "target must be an object"),
        (["notes"], [1], "notes must be a list"),
        (["lossless_check"], [], "lossless_check must be an object or null"),
        (["rows"], {}, "rows must be a list"),
        (["rows", 1], [], "rows must be a list"),
        (["rows", 1, "decoder"], "eagle", "rows[1].decoder must be autoregressive or dflash"),
        (["rows", 2, "budget"], None, "rows[2].budget must be the tree's node count"),
        (["rows", 2, "budget"], 0, "rows[2].budget"),
        (["rows", 1, "tau"], 0.9, "rows[1].tau must be at least 1, as it counts the bonus"),
        (["rows", 1, "tau"], 4.1, "rows[1].tau must be at most 4"),
        (["rows", 1, "tau"], None, "rows[1].tau must be null if and only if rounds is 0"),
        (
            ["rows", 1, "tau"],
            float("nan"),
            "rows[1].tau must be a number from 0 on or null, not nan",
        ),
        (["rows", 1, "tau_mean_of_responses"], 0.5, "rows[1].tau_mean_of_responses"),
        (["rows", 1, "ci95"], [2.0], "rows[1].ci95"),
        (["rows", 1, "ci95"], [3.0, 2.0], "rows[1].ci95"),
        (["rows", 1, "accept_at_position"], [0.5, 0.6, 0.1], "rows[1].accept_at_position"),
        (["rows", 1, "accept_at_position"], [1.5, 0.6, 0.1], "rows[1].accept_at_position"),
        (["rows", 1, "histogram", 0], 10**6, "rows[1].histogram must be 275 rounds in all"),
        (["rows", 1, "histogram", 0], 1.5, "rows[1].histogram"),
        (["rows", 1, "rounds"], True, "rows[1].rounds must be a whole number"),
        (["rows", 1, "tokens"], 10**400, "rows[1].tokens"),
        (["rows", 1, "lossless"], "yes", "rows[1].lossless must be true or false or null"),
        (["rows", 1, "reliable"], None, "rows[1].reliable must be true or false"),
        (["rows", 1, "lossless"], None, "rows[1].speedup must be null unless lossless"),
        (["rows", 1, "reliable"], False, "rows[1].speedup must be null unless lossless"),
        (["rows", 1, "phase_seconds"], {"draft": "fast"}, "rows[1].phase_seconds"),
        (
            ["rows", 1, "per_prompt", 2, "rounds"],
            24,
            "rows[1].per_prompt must be 275 rounds in all",
        ),
        (["rows", 1, "per_prompt", 2, "committed"], 99, "rows[1].per_prompt must be sums of tau"),
        (["rows", 1, "per_prompt", 2, "committed"], 3, "per_prompt[2].committed must be at least"),
        (["rows", 1, "per_prompt", 2, "id"], "p0", "rows[1].per_prompt must be 12 prompts"),
        (["rows", 1, "per_prompt", 2, "id"], 7, "rows[1].per_prompt[2].id must be text"),
        (["max_new_tokens"], "2048", "max_new_tokens must be a whole number"),
        (["rows", 1, "taus"], 1, "rows[1].taus must be left out"),
        (["rows", 3, "budget"], 4, "rows[3] must be another decoding than rows[2]"),
    ],
)
def test_a_bad_value_is_named(path: list[str | int], value: object, said: str) -> None:
    validate_results(RESULTS)
    with pytest.raises(UserError) as error:
        validate_results(changed(path, value))
    assert said in str(error.value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 0, 1, 4, 275, "ddtree", "dflash", 0.0, 1e308, "replay"])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def paths(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in the first three rows and above."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value[:4])
    places = [at]
    for key, inner in items:
        places += paths(inner, (*at, key)) if isinstance(inner, dict | list) else [(*at, key)]
    return places


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(paths(RESULTS)[1:]), JSON)
def test_any_change_is_fine_or_a_user_error(path: tuple[str | int, ...], value: object) -> None:
    results = changed(path, value)
    try:
        validate_results(results)
    except UserError:
        return
    assert terminal_table(results)
    assert markdown(results, [RESULTS])
    assert latex(results)


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_any_json_is_fine_or_a_user_error(value: object) -> None:
    with pytest.raises(UserError):
        validate_results(value)


BAD_FILES = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 9999, b"null", b'{"schema": 1}']


@pytest.mark.parametrize("data", BAD_FILES)
def test_an_unreadable_file_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(UserError, match=re.escape(str(path))):
        read_results(path)
    path.write_bytes(data)
    with pytest.raises(UserError, match=re.escape(str(path))):
        read_results(path)


def test_a_flipped_bit_changes_no_result(tmp_path: Path) -> None:
    """It is refused by the file's name, or it hit what nobody reads: white space, the seal's own name."""
    path = write_results(tmp_path, RESULTS)
    good, generator, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(300):
        bad = bytearray(good)
        bad[generator.randrange(len(bad))] ^= 1 << generator.randrange(8)
        path.write_bytes(bad)
        try:
            found = read_results(path)
        except UserError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert {key: found.get(key) for key in RESULTS} == RESULTS
    assert refused > 200
    path.write_text(good.decode().replace('"mode": "live"', '"mode": "replay"'))
    with pytest.raises(UserError, match=r"was changed after it was written.*evaluate again"):
        read_results(path)


def test_bad_results_are_not_written(tmp_path: Path) -> None:
    write_results(tmp_path, RESULTS)
    with pytest.raises(UserError, match="mode"):
        write_report(tmp_path, RESULTS | {"mode": "dead"}, [])
    assert read_results(tmp_path / "results.json") == RESULTS


def test_latest_results_are_sorted_and_name_what_they_skip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The folder of a long run: 1000000 comes before 200000 by name.
    for step in (1_000_000, 200_000, 3):
        write_results(tmp_path / "evals" / f"step-{step:06d}", make_results(step, mode="replay"))
    live = make_results(3, mode="live")
    write_results(tmp_path / "evals" / "step-000003" / "live", live)
    (tmp_path / "evals" / "step-000004").mkdir()
    torn = tmp_path / "evals" / "step-000005" / "results.json"
    torn.parent.mkdir()
    torn.write_text(json.dumps(RESULTS)[:-40])
    found = [(r["checkpoint"]["step"], r["mode"]) for r in latest_results(tmp_path)]
    assert found == [(3, "live"), (3, "replay"), (200_000, "replay"), (1_000_000, "replay")]
    errors = capsys.readouterr().err.splitlines()
    assert [("step-000004" in line, "step-000005" in line) for line in errors] == [
        (True, False),
        (False, True),
    ]
    assert latest_results(tmp_path / "nothing") == []


# Tables


def test_table_is_aligned_and_has_a_row_for_each_data_set_and_decoder() -> None:
    """F19: never one mean over all data sets."""
    lines = terminal_table(RESULTS).splitlines()
    assert lines[0] == "Qwen3-8B | step 200 | live | greedy"
    body = lines[2:]
    assert [line.split()[0] for line in body] == ["math"] * 4 + ["chat"] * 4 + ["few"] * 4
    for heading, right in (("decoder", False), ("tau [95 %]", False), ("lossless", False)):
        assert not right
        column = lines[1].index(heading)
        assert all(line[column - 1] == " " and line[column] != " " for line in body)
    ends = lines[1].index("rounds") + len("rounds")
    assert all(line[ends - 1].isdigit() and line[ends : ends + 1] in ("", " ") for line in body)


def test_table_shows_the_numbers_of_the_row() -> None:
    row = RESULTS["rows"][1]
    line = terminal_table(RESULTS).splitlines()[3]
    low, high = row["ci95"]
    assert f"{row['tau']:.2f} [{low:.2f}, {high:.2f}]" in line
    assert f"{row['tau_without_bonus']:.2f}" in line
    assert f"{row['tau_mean_of_responses']:.2f} (" in line
    assert f"{row['tokens_per_second']:.1f}" in line
    assert f"{row['speedup']:.2f}x" in line
    assert "yes" in line
    assert "DFlash chain" in line
    assert "reference" in terminal_table(RESULTS).splitlines()[2]


def test_remarks_tell_what_not_to_rely_on() -> None:
    odd = [
        make_row("a", "dflash", None, 0.5, prompts=5),
        make_row("b", "dflash", None, 0.5, lossless=False, speedup=None),
        make_row("c", "dflash", None, 0.5, lossless=None, speedup=None, repetitive_answers=3),
        make_row("d", "dflash", None, 0.5, prompts=1),  # no rounds
    ]
    results = validate_results(RESULTS | {"rows": odd})
    lines = terminal_table(results).splitlines()[2:]
    assert "unreliable, under 200 rounds" in lines[0]
    assert "unreliable" not in lines[1]
    assert "NO" in lines[1].split()
    assert "INVALID, not lossless" in lines[1]
    assert "not checked" in lines[2]
    assert "3 repetitive, 1 short" in lines[2]
    assert re.search(r"DFlash chain +- +- +- +", lines[3])
    assert invalid_rows(results) == ["b, DFlash chain"]
    assert invalid_rows(RESULTS) == []


def test_report_says_what_was_tested_and_how_to_repeat_it() -> None:
    """F11b: contract, dtype, compared tokens, mismatches and margin. F3: the definition."""
    check = {"contract": "greedy text", "dtype": "bfloat16", "compared_tokens": 4321}
    check |= {"mismatches": 2, "max_margin": 0.125}
    notes = ["1 prompt of math is in the training set"]
    text = markdown(RESULTS | {"lossless_check": check, "notes": notes}, [])
    told = (
        "contract greedy text, dtype bfloat16, compared tokens 4321, mismatches 2, max margin 0.125"
    )
    for words in (told, notes[0], "with** the bonus token", "Without bonus", "- Decoding: greedy"):
        assert words in text
    assert "```bash\npython eval/main.py --config configs/x.yaml\n```" in text
    assert "not made in this evaluation" in markdown(RESULTS, [])
    assert "INVALID" not in text


def test_report_of_a_wrong_text_says_so_before_any_number() -> None:
    """F21: an acceptance length is worth nothing when the text is not the target's."""
    rows = [row | {"lossless": False, "speedup": None} for row in RESULTS["rows"][:2]]
    text = markdown(RESULTS | {"rows": rows}, [])
    assert text.index("**INVALID: not lossless: math, plain; math, DFlash chain.**") < text.index(
        "|"
    )
    assert "![" not in text  # nothing is drawn of it


def test_names_cannot_break_the_markdown_table() -> None:
    results = changed(["rows", 0, "dataset"], "a|b<img>\n*c*")
    lines = markdown(results, []).splitlines()
    row = next(line for line in lines if line.startswith("| a") and "plain" in line)
    assert row.startswith(r"| a\|b\<img\> \*c\* | plain |")
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in lines if line[:1] == "|"]
    assert sorted(set(bars)) == [5, 9, 12]  # data sets by decoders, the times, every row
    assert bars.count(12) == 2 + len(RESULTS["rows"])


# Plots


def lines_of(figure: Figure, panel: int = 0) -> dict[str, Line2D]:
    """The labelled lines of a panel."""
    return {str(line.get_label()): line for line in figure.axes[panel].get_lines()}


def xs(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata()).tolist()


def ys(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def expected(results: Json, name: str, decoder: str) -> list[float]:
    return [r["tau"] for r in results["rows"] if (r["dataset"], r["decoder"]) == (name, decoder)]


def test_budget_plot_draws_each_data_set_with_interval_and_chain() -> None:
    figure = plot_tau_vs_budget(RESULTS)
    lines = lines_of(figure)
    for name in ("math", "chat", "few"):
        assert xs(lines[name]) == [4, 16]
        assert ys(lines[name]) == expected(RESULTS, name, "ddtree")
    chains = {
        ys(line)[0]
        for line in figure.axes[0].get_lines()
        if line.get_marker() == "D" and xs(line) == [BLOCK - 1]
    }
    assert chains == {expected(RESULTS, name, "dflash")[0] for name in ("math", "chat", "few")}
    bands = [c for c in figure.axes[0].collections if isinstance(c, FillBetweenPolyCollection)]
    tops = {float(np.asarray(band.get_paths()[0].vertices)[:, 1].max()) for band in bands}
    assert max(row["ci95"][1] for row in RESULTS["rows"] if row["dataset"] == "math") in tops
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert ticks == ["4", "16"]


def test_unreliable_points_are_white_and_wrong_ones_are_not_drawn() -> None:
    rows = [r for r in RESULTS["rows"] if r["dataset"] != "chat"]
    wrong = [r | {"lossless": False, "speedup": None} for r in RESULTS["rows"][4:8]]
    figure = plot_tau_vs_budget(RESULTS | {"rows": rows + wrong})
    assert "chat" not in lines_of(figure)
    white = [
        ys(line) for line in figure.axes[0].get_lines() if line.get_markerfacecolor() == "white"
    ]
    assert sorted(white) == sorted(expected(RESULTS, "few", d) for d in ("ddtree", "dflash"))


def test_step_plot_has_a_panel_for_the_chain_and_one_for_the_largest_tree() -> None:
    runs = [make_results(step, 0.3 + step / 1000) for step in (100, 200, 300)]
    figure = plot_tau_vs_step([runs[2], runs[0], runs[1]])
    assert [ax.get_title() for ax in figure.axes] == ["DFlash chain", "DDTree 16"]
    for panel, (decoder, which) in enumerate((("dflash", 0), ("ddtree", 1))):
        line = lines_of(figure, panel)["chat"]
        assert xs(line) == [100, 200, 300]
        assert ys(line) == [expected(r, "chat", decoder)[which] for r in runs]


def test_position_plot_draws_the_chain() -> None:
    lines = lines_of(plot_acceptance_by_position(RESULTS))
    assert lines.keys() == {"math", "chat", "few"}
    assert xs(lines["math"]) == [1, 2, 3]
    assert ys(lines["math"]) == RESULTS["rows"][1]["accept_at_position"]
    assert lines["few"].get_markerfacecolor() == "white"


def test_published_tau_is_drawn_beside_ours_where_it_is_comparable() -> None:
    """The paper's curve for Qwen3-8B on MATH-500, and nothing for other targets or sampling."""
    rows = [row | {"dataset": "math500"} for row in RESULTS["rows"][:4]]
    results = validate_results(RESULTS | {"rows": rows})
    line = lines_of(plot_tau_vs_budget(results))["math500, DDTree paper"]
    assert (xs(line), ys(line)) == (
        [15, 16, 32, 64, 128, 256, 512, 1024],
        [7.79, 8.61, 9.27, 9.75, 10.20, 10.43, 10.73, 10.98],
    )
    assert (line.get_linestyle(), line.get_color()) == ("--", "0.45")
    for changes in (
        {"target": {"path": "Qwen/Qwen3-1.7B"}},
        {"target": {"path": "Qwen/Qwen3-8B", "enable_thinking": True}},
        {"rows": [row | {"temperature": 1.0} for row in rows]},
    ):
        assert not any("paper" in name for name in lines_of(plot_tau_vs_budget(results | changes)))


def test_published_chains_are_all_there_under_one_name() -> None:
    names = {"math": "gsm8k", "chat": "humaneval", "few": "mt-bench"}
    rows = [row | {"dataset": names[row["dataset"]]} for row in RESULTS["rows"]]
    figure = plot_tau_vs_budget(validate_results(RESULTS | {"rows": rows}))
    points = {(*xs(line), *ys(line)) for line in figure.axes[0].get_lines() if len(xs(line)) == 1}
    assert {(15, 6.54), (15, 6.5), (15, 4.24)} < points
    legend = figure.axes[0].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels.count("DFlash paper, chain of 15") == 1


def test_time_plot_stacks_the_phases_of_each_decoder() -> None:
    """By hand: 11 answers a set (the first has no round) of 25 rounds, 0.4 + 0.1 + 0.9 + 0.1 s an answer."""
    figure = plot_time_per_phase(RESULTS)
    ax = figure.axes[0]
    bars = {str(c.get_label()): [bar.get_width() for bar in c] for c in ax.containers}
    assert list(bars) == ["draft", "build", "verify", "commit"]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["plain", "DFlash chain", "DDTree 4", "DDTree 16"]
    # 12, 12 and 6 prompts: 30 answers, of which 27 have rounds
    assert bars["verify"][1:] == pytest.approx([900 * 30 / (27 * 25)] * 3)
    starts = [bar.get_x() for bar in ax.containers[2]]
    assert starts[1] == pytest.approx(500 * 30 / (27 * 25))
    total = 1500 * 30 / (27 * 25)
    tau = sum(r["tau"] * r["rounds"] for r in RESULTS["rows"][1::4]) / (27 * 25)
    assert ax.texts[1].get_text() == f" {total:.3g} ms, {total / tau:.3g} ms a token"
    FigureCanvasAgg(figure).draw()
    for text in ax.texts:
        assert text.get_window_extent().x1 <= ax.get_window_extent().x1
    untimed = [row | {"phase_seconds": None} for row in RESULTS["rows"]]
    assert "## Time" in markdown(RESULTS, [])
    assert "## Time" not in markdown(RESULTS | {"rows": untimed}, [])


def test_every_plot_says_target_decoding_interval_and_data() -> None:
    runs = [make_results(step) for step in (100, 300)]
    target = str(runs[1]["target"]["path"]).rpartition("/")[2]
    for figure, steps, spread in (
        (plot_tau_vs_budget(runs[1]), "step 300", "95 % bootstrap"),
        (plot_tau_vs_step(runs), "steps 100 to 300", "95 % bootstrap"),
        (plot_acceptance_by_position(runs[1]), "step 300", "no interval"),
        (plot_time_per_phase(runs[1]), "step 300", "no interval"),
    ):
        assert f"{target} | {steps} | live | greedy" in figure.get_suptitle()
        below = " ".join(figure.get_supxlabel().split())
        assert spread in below and "prompts: " in below
        for row in runs[1]["rows"]:
            assert f"{row['dataset']} {row['prompts']}" in below


def test_no_text_of_a_plot_is_cut_off() -> None:
    """Eleven data sets, long names, and a name that would be a formula and hidden in the legend."""
    names = [f"benchmark-number-{i}" for i in range(9)] + ["_$x^$", "a" * 80]
    rows = [
        make_row(name, decoder, budget, 0.5)
        for name in names
        for decoder, budget in (("dflash", None), ("ddtree", 4), ("ddtree", 64))
    ]
    target = {"path": "/models/" + "Qwen3.6-27B-instruct" * 5}
    runs = [make_results(step, rows=rows, target=target) for step in (100, 100_000)]
    for figure in (
        plot_tau_vs_budget(runs[1]),
        plot_tau_vs_step(runs),
        plot_acceptance_by_position(runs[1]),
        plot_time_per_phase(runs[1]),
    ):
        FigureCanvasAgg(figure).draw()
        legend = figure.axes[-1].get_legend()
        assert legend is not None
        labels = [text.get_text() for text in legend.get_texts()]
        assert {r"\$x^\$", "a" * 29 + "..."} < set(labels) or "verify" in labels
        assert len(set(labels)) == len(labels) >= (4 if "verify" in labels else len(names))
        drawn = figure.get_tightbbox()  # in inches, as the size is
        width, height = figure.get_size_inches()
        assert drawn.x0 >= 0
        assert drawn.y0 >= 0
        assert drawn.x1 <= width
        assert drawn.y1 <= height


def test_report_files_are_complete_and_its_pictures_exist(tmp_path: Path) -> None:
    write_report(tmp_path, RESULTS, [make_results(100, 0.3), make_results(50, mode="replay")])
    text = (tmp_path / "report.md").read_text()
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(pictures) == 4
    for name in pictures:
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        pixels = imread(tmp_path / name)
        assert pixels.shape[0] >= 600
        assert pixels.shape[1] >= 1000
        assert pixels[..., :3].std() > 0.05  # more than a blank page
        assert b"</svg>" in (tmp_path / name).with_suffix(".svg").read_bytes()[-20:]
    files = {p.name for p in tmp_path.iterdir()}
    assert files == {
        "results.json",
        "report.md",
        "report.tex",
        *pictures,
        *(p[:-3] + "svg" for p in pictures),
    }


def test_only_what_there_is_gets_drawn(tmp_path: Path) -> None:
    """No history in this mode, no trees: one plot. A drafter from outside has no step."""
    rows = [r | {"phase_seconds": None} for r in RESULTS["rows"] if r["decoder"] != "ddtree"]
    history = [make_results(100, mode="replay"), make_results(200)]
    write_report(tmp_path, RESULTS | {"rows": rows}, history)
    assert [p.name for p in tmp_path.glob("*.png")] == ["acceptance_by_position.png"]
    outside = make_results(None)
    write_report(tmp_path / "outside", outside, [make_results(200)])
    assert "external drafter" in (tmp_path / "outside" / "report.md").read_text()
    write_report(tmp_path / "empty", RESULTS | {"rows": []}, [])
    assert list((tmp_path / "empty").glob("*.png")) == []


def test_reports_are_made_without_torch() -> None:
    code = "import eval.report, sys; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_every_row_field_is_checked() -> None:
    """A field that summarize adds is one that the reader knows."""
    for key in Row.__dataclass_fields__:
        with pytest.raises(UserError, match=rf"rows\[1\]\.{key}.* must be"):
            validate_results(changed(["rows", 1, key], [{}]))
