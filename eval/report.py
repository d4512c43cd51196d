"""What an evaluation leaves in its folder, and the readers of it.

    evals/step-000200/  results.json  report.md  *.png  *.svg

results.json is the record and is written first; the rest is drawn from it and can be drawn again.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from configs.load import UserError
from configs.provenance import atomic_write_json, atomic_write_text
from eval.metrics import MIN_PROMPTS, MIN_ROUNDS, MODES, Json, validate_results

FORMATS = ("png", "svg")
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


def write_results(folder: Path, results: Json) -> Path:
    """Check results and write folder/results.json in one piece. Raises UserError."""
    validate_results(results)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    atomic_write_json(path, results)
    return path


def read_results(path: Path) -> Json:
    """Return a checked results.json. Raises UserError that names the file."""
    try:
        return validate_results(json.loads(path.read_bytes()))
    except (UserError, OSError, ValueError, RecursionError) as error:  # the last: "[[[[[[..."
        raise UserError(f"cannot read {path}: {error}") from None


def latest_results(run_dir: Path) -> list[Json]:
    """Results of all evaluations in a run folder, by step and mode.

    They lie in evals/step-*/ or one folder deeper. What cannot be read is named on stderr.
    """
    found = []
    for folder in sorted((run_dir / "evals").glob("step-*")):
        for path in [*folder.glob("**/results.json")] or [folder / "results.json"]:
            try:
                found.append(read_results(path))
            except UserError as error:
                print(f"skipped: {error}", file=sys.stderr)
    return sorted(found, key=lambda results: (_order(results), results["mode"]))


def invalid_rows(results: Json) -> list[str]:
    """What a command must not end with success for: rows whose text is not plain decoding's."""
    return [f"{r['dataset']}, {_decoder(r)}" for r in results["rows"] if r["lossless"] is False]


def terminal_table(results: Json) -> str:
    """The rows as an aligned text table, below a line that says what was measured."""
    table = [HEADINGS.split("|"), *map(_cells, results["rows"])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [_subject(results)]
    for cells in table:
        aligned = zip(cells, widths, SIDES, strict=True)
        lines.append("  ".join(f"{cell:{side}{width}}" for cell, width, side in aligned).rstrip())
    return "\n".join(lines)


def _cells(row: Json) -> list[str]:
    tau = _fixed(row["tau"])
    if row["ci95"]:
        tau += " [{:.2f}, {:.2f}]".format(*row["ci95"])
    mean = _fixed(row["tau_mean_of_responses"])
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
        _decoder(row),
        tau,
        mean,
        _fixed(row.get("tau_without_bonus")),
        _fixed(row["tokens_per_second"], 1),
        _fixed(row["speedup"]) + "x" * (row["speedup"] is not None),
        "reference" if row["decoder"] == "autoregressive" and lossless != "NO" else lossless,
        str(row["prompts"]),
        str(row["rounds"]),
        ", ".join(remarks),
    ]


def _kind(row: Json) -> str:
    tree = f"DDTree {row['budget']}"
    return {"autoregressive": "plain", "dflash": "DFlash chain", "ddtree": tree}[row["decoder"]]


def _decoder(row: Json) -> str:
    return _kind(row) + (f" T={row['temperature']:g}" if row["temperature"] > 0 else "")


def _fixed(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _subject(results: Json) -> str:
    """Target, checkpoint, mode and decoding, in one line."""
    heats = sorted({row["temperature"] for row in results["rows"]})
    decoding = ", ".join(f"temperature {t:g}" if t > 0 else "greedy" for t in heats)
    return " | ".join([_target(results), _step(results), results["mode"], decoding or "no rows"])


def _target(results: Json) -> str:
    target = results["target"]
    named = (target[k] for k in ("name", "id", "path", "package") if target.get(k))
    return str(next(named, "unnamed target")).rstrip("/").rsplit("/", 1)[-1]


def _step(results: Json) -> str:
    step = results["checkpoint"]["step"]
    return "external drafter" if step is None else f"step {step}"


def markdown(results: Json, history: Sequence[Json]) -> str:
    """The text of report.md. history: results of the run's other checkpoints."""
    provenance = results["provenance"]
    parts = [f"# Acceptance length: {_target(results)}, {_step(results)}"]
    if invalid := invalid_rows(results):
        parts.append(
            f"**INVALID: not lossless: {'; '.join(map(_escaped, invalid))}.** The text differs "
            "from plain decoding, so these acceptance lengths mean nothing."
        )
    measured = {
        "Target": results["target"],
        "Checkpoint": results["checkpoint"],
        "Mode": f"{results['mode']}: {MODES[results['mode']]}",
        "Decoding": _subject(results).rsplit(" | ", 1)[-1],
        "Lossless check": results.get("lossless_check") or "not made in this evaluation",
    }
    parts += ["## What was measured", _bullets(measured), "## Result"]
    table = [map(_escaped, cells) for cells in (HEADINGS.split("|"), *map(_cells, results["rows"]))]
    table.insert(1, map({"<": ":--", ">": "--:"}.__getitem__, SIDES))
    parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in table))
    parts += [DEFINITION, *map(_escaped, results.get("notes", []))]
    if plots := _plots(results, history):
        parts.append("## Plots")
        parts += [f"![{name.replace('_', ' ')}]({name}.png)" for name in plots]
    parts += ["## How to reproduce", f"```bash\n{provenance.get('command', '(unknown)')}\n```"]
    parts.append(_bullets({k: v for k, v in provenance.items() if k != "command"}))
    return "\n\n".join(filter(None, parts)) + "\n"


def _bullets(items: Mapping[str, Any]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{k.replace('_', ' ')} {shown(v)}" for k, v in value.items())
        return _escaped(str(value))

    return "\n".join(f"- {k.replace('_', ' ')}: {shown(v)}" for k, v in items.items())


def _escaped(text: str) -> str:
    """Text as one line that Markdown leaves as it is."""
    return re.sub(r"([\\`*_|<>])", r"\\\1", " ".join(text.split()))


def _order(results: Json) -> int:
    step: int | None = results["checkpoint"]["step"]
    return -1 if step is None else step


def _timeline(results: Json, history: Sequence[Json]) -> list[Json]:
    """The checkpoints of a run, by step, as far as they were measured in the same mode."""
    same = [r for r in (*history, results) if r["mode"] == results["mode"]]
    return sorted({_order(r): r for r in same}.values(), key=_order)


# Okabe and Ito's colours, which colour-blind readers can tell apart; their yellow is too pale here.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^vPX<>"  # 8 against 7 colours: 56 lines that differ
BANDS = "bands: 95 % bootstrap over prompts; white markers: too few rounds or prompts"
TAU_AXIS = "tau: tokens per round, bonus included"


def plot_tau_vs_budget(results: Json) -> Figure:
    """tau of the trees by their size, and of the chain at the size it has."""
    figure, (ax,) = _figure(results, "Acceptance length by size of the draft", BANDS)
    label = ""
    sizes = sorted({_nodes(r) for r in results["rows"] if r["decoder"] == "ddtree"})
    for index, (name, rows) in enumerate(_by_data_set(results).items()):
        trees = [(_nodes(r), r) for r in rows if r["decoder"] == "ddtree"]
        chain = [(_nodes(r), r) for r in rows if r["decoder"] == "dflash"]
        _line(ax, trees, index, label=_literal(name, 32))
        _line(ax, chain, index, marker="D")
        for nodes, row in chain:  # carried on, to compare the trees with
            xs = [nodes, max(nodes, *sizes, 1)]
            ax.plot(xs, [row["tau"]] * 2, ":", color=COLOURS[index % len(COLOURS)])
            label = f"DFlash chain, {nodes} nodes"
    if label:
        ax.plot([], [], "D:", color="0.4", label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, map(str, sizes))
    ax.set(xlabel="drafted nodes per round", ylabel=TAU_AXIS, ylim=(1, None))
    _legend(ax)
    return figure


def plot_tau_vs_step(timeline: Sequence[Json]) -> Figure:
    """tau by training step: a panel each for the chain and the largest tree of the last results."""
    timeline = sorted((r for r in timeline if r["checkpoint"]["step"] is not None), key=_order)
    last = [row for rows in _by_data_set(timeline[-1]).values() for row in rows]
    kinds = {r["decoder"]: _kind(r) for r in sorted(last, key=_nodes)}
    kinds.pop("autoregressive", None)
    figure, axes = _figure(
        timeline[-1], "Acceptance length over training", BANDS, max(1, len(kinds))
    )
    for ax, kind in zip(axes, sorted(kinds.values(), reverse=True), strict=False):
        for index, name in enumerate(_by_data_set(timeline[-1])):
            rows = [(r["checkpoint"]["step"], _by_data_set(r).get(name, [])) for r in timeline]
            points = [(step, row) for step, group in rows for row in group if _kind(row) == kind]
            _line(ax, points, index, label=_literal(name, 32))
        ax.set(title=kind, xlabel="optimizer step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set(ylabel=TAU_AXIS, ylim=(1, None))
    _legend(axes[-1])
    return figure


def plot_acceptance_by_position(results: Json) -> Figure:
    """How often the chain's first, second, ... drafted token was accepted."""
    note = "a draft counts only after all before it; white markers: too few rounds or prompts"
    figure, (ax,) = _figure(results, "Acceptance by position, DFlash chain", note)
    for index, (name, rows) in enumerate(_by_data_set(results).items()):
        for row in (r for r in rows if r["decoder"] == "dflash"):
            shares = row["accept_at_position"]
            look = _style(index) | ({} if row["reliable"] else {"markerfacecolor": "white"})
            ax.plot(range(1, len(shares) + 1), shares, label=_literal(name, 32), **look)
    ax.set(xlabel="drafted token", ylabel="share of rounds that accepted it", ylim=(0, 1))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(ax)
    return figure


def _by_data_set(results: Json) -> dict[str, list[Json]]:
    """The rows to draw: not those without rounds, and not what is not lossless."""
    groups: dict[str, list[Json]] = {}
    for row in sorted(results["rows"], key=_nodes):
        if row["tau"] is not None and row["lossless"] is not False:
            heat = f" T={row['temperature']:g}" if row["temperature"] > 0 else ""
            groups.setdefault(row["dataset"] + heat, []).append(row)
    return groups


def _nodes(row: Json) -> int:
    """Drafted nodes per round: a chain has block_size - 1."""
    return int(row["budget"] or max(len(row["histogram"]) - 1, 1))


def _literal(text: str, longest: int) -> str:
    """Text that matplotlib draws as it is: no formula, no hidden legend entry, not cut off."""
    short = text if len(text) <= longest else text[: longest - 3] + "..."
    return short.replace("$", r"\$").lstrip("_")


def _style(index: int) -> dict[str, Any]:
    look = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
    return {**look, "clip_on": False}


def _line(ax: Axes, points: Sequence[tuple[int, Json]], index: int, **look: Any) -> None:
    """A line of tau over x with its interval."""
    if not points:
        return
    xs, rows = zip(*points, strict=True)
    lows, highs = zip(*(row["ci95"] or (row["tau"], row["tau"]) for row in rows), strict=True)
    style = {**_style(index), **look}
    ax.fill_between(xs, lows, highs, color=style["color"], alpha=0.12, linewidth=0)
    ax.vlines(xs, lows, highs, color=style["color"], alpha=0.5, linewidth=1)
    ax.plot(xs, [row["tau"] for row in rows], **style)
    hollow = [(x, row["tau"]) for x, row in points if not row["reliable"]]
    style = {**style, "label": None, "linestyle": "none", "markerfacecolor": "white"}
    ax.plot(*zip(*hollow, strict=True), **style) if hollow else None


def _figure(results: Json, title: str, note: str, panels: int = 1) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(3.5 + 4.5 * panels, 5), dpi=150, layout="constrained")
    figure.suptitle(f"{title}\n{_literal(_subject(results), 80)}", fontsize=12)
    figure.supxlabel(note, fontsize=8, color="0.35")
    axes: Sequence[Axes] = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(ax: Axes) -> None:
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def _plots(results: Json, history: Sequence[Json]) -> dict[str, Callable[[], Figure]]:
    """The plots there is something to draw for: file name to what draws it."""
    decoders = {row["decoder"] for rows in _by_data_set(results).values() for row in rows}
    timeline = _timeline(results, history)
    plots: dict[str, Callable[[], Figure]] = {}
    if "ddtree" in decoders:
        plots["tau_vs_budget"] = lambda: plot_tau_vs_budget(results)
    if len(timeline) > 1 and decoders & {"dflash", "ddtree"}:
        plots["tau_vs_step"] = lambda: plot_tau_vs_step(timeline)
    if "dflash" in decoders:
        plots["acceptance_by_position"] = lambda: plot_acceptance_by_position(results)
    return plots


def write_report(folder: Path, results: Json, history: Sequence[Json]) -> None:
    """Write results.json, and then the report and its plots. Raises UserError for bad results."""
    write_results(folder, results)
    for name, draw in _plots(results, history).items():
        figure = draw()
        for suffix in FORMATS:
            # Drawn beside and renamed: a reader of a run in progress never sees half a picture.
            temporary = folder / f".{name}.tmp-{os.getpid()}"
            figure.savefig(temporary, format=suffix)
            temporary.replace(folder / f"{name}.{suffix}")
    atomic_write_text(folder / "report.md", markdown(results, history))
