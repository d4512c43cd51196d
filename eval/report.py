"""What an evaluation leaves in its folder.

    evals/step-000200/  results.json  report.md  report.tex  *.png  *.svg

results.json is the record and is written first; the rest is drawn from it and can be drawn again.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.provenance import atomic_write_text
from eval.metrics import MIN_PROMPTS, MIN_ROUNDS, MODES, PHASES, Json
from eval.plots import plots_of, write_plots
from eval.results import (
    decoder_name,
    decoding,
    invalid_rows,
    phase_times,
    step_name,
    subject,
    target_name,
    write_results,
)
from eval.tables import (
    aligned,
    escaped,
    fixed,
    latex,
    markdown_table,
    overview_markdown,
    tau_cell,
)

DEFINITION = (
    "**tau** is the number of tokens per verification round **with** the bonus token (as DFlash, "
    "DDTree, vLLM and SGLang count), pooled over all rounds; the interval is a 95 % bootstrap over "
    "prompts. *Without bonus* is the mean number of accepted drafts, *mean of responses* averages "
    "the answers' own tau, whatever their length."
)
HEADINGS = (
    "data set|decoder|tau [95 %]|mean of responses (quartiles)|without bonus|tok/s|speed-up|"
    "lossless|prompts|rounds|remarks"
)
SIDES = "<<<>>>><>><"  # of HEADINGS: how each column is aligned


def write_report(folder: Path, results: Json, history: Sequence[Json]) -> None:
    """Write results.json, and then the report and its plots. Raises UserError for bad results."""
    write_results(folder, results)
    write_plots(folder, plots_of(results, history))
    atomic_write_text(folder / "report.tex", latex(results))
    report = folder / "report.md"
    atomic_write_text(report, markdown(results, history))
    # eval.done.reported compares the two, and the clock may have been set back in between
    oldest = (folder / "results.json").stat().st_mtime_ns
    if report.stat().st_mtime_ns < oldest:
        os.utime(report, ns=(oldest, oldest))


def terminal_table(results: Json) -> str:
    """The rows as an aligned text table, below a line that says what was measured."""
    table = [HEADINGS.split("|"), *map(_cells, results["rows"])]
    return f"{subject(results)}\n{aligned(table, SIDES)}"


def _cells(row: Json) -> list[str]:
    mean = fixed(row["tau_mean_of_responses"])
    if quartiles := row.get("tau_quartiles_of_responses"):
        mean += " ({:.1f} to {:.1f})".format(*quartiles)
    lossless = {True: "yes", False: "NO", None: "not checked"}[row["lossless"]]
    remarks = ["INVALID, not lossless"] if row["lossless"] is False else []
    if not row["reliable"]:
        few = f"{MIN_ROUNDS} rounds" if row["rounds"] < MIN_ROUNDS else f"{MIN_PROMPTS} prompts"
        remarks.append(f"unreliable, under {few}")
    for kind in ("repetitive", "short"):
        if count := row.get(f"{kind}_answers"):
            remarks.append(f"{count} {kind}")
    return [
        row["dataset"],
        decoder_name(row),
        tau_cell(row),
        mean,
        fixed(row.get("tau_without_bonus")),
        fixed(row["tokens_per_second"], 1),
        fixed(row["speedup"]) + "x" * (row["speedup"] is not None),
        "reference" if row["decoder"] == "autoregressive" and lossless != "NO" else lossless,
        str(row["prompts"]),
        str(row["rounds"]),
        ", ".join(remarks),
    ]


def markdown(results: Json, history: Sequence[Json]) -> str:
    """The text of report.md. history: results of the run's other checkpoints."""
    provenance = results["provenance"]
    parts = [f"# Acceptance length: {target_name(results)}, {step_name(results)}"]
    if invalid := invalid_rows(results):
        parts.append(
            f"**INVALID: not lossless: {'; '.join(map(escaped, invalid))}.** The text differs "
            "from plain decoding, so these acceptance lengths mean nothing."
        )
    parts.append(overview_markdown(results))
    measured = {
        "Target": results["target"],
        "Checkpoint": results["checkpoint"],
        "Mode": f"{results['mode']}: {MODES[results['mode']]}",
        "Decoding": decoding(results),
        "Longest answer": results.get("max_new_tokens") or "not recorded",
        "Lossless check": results.get("lossless_check") or "not made in this evaluation",
    }
    parts += ["## What was measured", _bullets(measured), "## Result"]
    parts.append(markdown_table([HEADINGS.split("|"), *map(_cells, results["rows"])], SIDES))
    parts += [DEFINITION, *map(escaped, results.get("notes", []))]
    if times := _time_table(results):
        parts += ["## Time", markdown_table(times, "<" + ">" * (len(times[0]) - 1))]
        parts.append("Milliseconds, mean over the rounds of all data sets, without the prefill.")
    if plots := plots_of(results, history):
        parts.append("## Plots")
        parts += [f"![{name.replace('_', ' ')}]({name}.png)" for name in plots]
    parts += ["## How to reproduce", f"```bash\n{provenance.get('command', '(unknown)')}\n```"]
    parts.append(_bullets({k: v for k, v in provenance.items() if k != "command"}))
    return "\n\n".join(filter(None, parts)) + "\n"


def _time_table(results: Json) -> list[list[str]]:
    """What a round of each decoder costs, by phase; nothing where nothing was timed."""
    times = phase_times(results)
    names = list(dict.fromkeys([*PHASES, *(name for t in times for name in t.phases)]))
    table = [["decoder", "rounds", *names, "a round", "a token"]]
    for t in times:
        total = sum(t.phases.values())
        numbers = [*(t.phases.get(name, 0.0) for name in names), total, total / t.tau]
        table.append([t.decoder, str(t.rounds), *(fixed(1000 * x) for x in numbers)])
    return table if times else []


def _bullets(items: Mapping[str, Any]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{k.replace('_', ' ')} {shown(v)}" for k, v in value.items())
        return escaped(str(value))

    return "\n".join(f"- {k.replace('_', ' ')}: {shown(v)}" for k, v in items.items())
