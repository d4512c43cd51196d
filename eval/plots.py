"""The figures of a report: what there is to draw, and the drawing."""

import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from eval.metrics import MIN_ROUNDS, PHASES, Json
from eval.results import (
    by_data_set,
    data_of,
    kind_of,
    nodes_of,
    phase_times,
    published_of,
    subject,
    timeline_of,
)

FORMATS = ("png", "svg")

# Okabe and Ito's colours, which colour-blind readers can tell apart; their yellow is too pale here.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^vPX<>"  # 8 against 7 colours: 56 lines that differ
BANDS = "bands: 95 % bootstrap over prompts; white markers: too few rounds or prompts"
GREYS = ("0.25", "0.6")  # of published chains
PUBLISHED_CHAIN = 15  # drafted nodes of a published chain: all have blocks of 16
TAU_AXIS = "tau: tokens per round, bonus included"


def plot_tau_vs_budget(results: Json) -> Figure:
    """tau of the trees by their size, of the chain at the size it has, and what others published."""
    figure, (ax,) = _figure(results, "Acceptance length by size of the draft", BANDS)
    label = ""
    sizes = {nodes_of(r) for r in results["rows"] if r["decoder"] == "ddtree"}
    for index, (name, rows) in enumerate(by_data_set(results).items()):
        trees = [(nodes_of(r), r) for r in rows if r["decoder"] == "ddtree"]
        chain = [(nodes_of(r), r) for r in rows if r["decoder"] == "dflash"]
        _line(ax, trees, index, label=_literal(name, 32))
        _line(ax, chain, index, marker="D")
        for nodes, row in chain:  # carried on, to compare the trees with
            xs = [nodes, max(nodes, *sizes, 1)]
            ax.plot(xs, [row["tau"]] * 2, ":", color=COLOURS[index % len(COLOURS)])
            label = f"DFlash chain, {nodes} nodes"
    if label:
        ax.plot([], [], "D:", color="0.4", label=label)
    ax.set_xscale("log", base=2)
    sizes |= _draw_published(figure, ax, results)
    ax.set_xticks(sorted(sizes), map(str, sorted(sizes)))
    ax.set(xlabel="drafted nodes per round", ylabel=TAU_AXIS, ylim=(1, None))
    _legend(ax)
    return figure


def _draw_published(figure: Figure, ax: Axes, results: Json) -> set[int]:
    """Others' tau in grey, with the data sets' markers; returns their tree sizes.

    A chain without trees has 15 nodes, as ours may have: those stand to the left, a group for each
    source, and in three columns, as data sets are often alike.
    """
    sizes: set[int] = set()
    chains: list[str] = []  # sources
    for index, (name, rows) in enumerate(by_data_set(results).items()):
        points = published_of(results, rows)
        sizes |= {p.budget for p in points if p.budget}
        for source in dict.fromkeys(p.source for p in points):
            curve = [(p.budget or PUBLISHED_CHAIN, p.tau) for p in points if p.source == source]
            look = _style(index) | {"color": "0.45", "linestyle": "--", "zorder": 1.5}
            if [x for x, _ in curve] != [PUBLISHED_CHAIN]:
                ax.plot(*zip(*curve, strict=True), label=_literal(f"{name}, {source}", 48), **look)
                continue
            label = f"{source}, chain of {PUBLISHED_CHAIN}"
            known = source in chains
            chains += [] if known else [source]
            left = 10 + 27 * chains.index(source) + 7 * (index % 3)
            aside = offset_copy(ax.transData, figure, x=-left, units="points")
            look |= {"color": GREYS[chains.index(source) % len(GREYS)], "linestyle": "none"}
            look |= {"transform": aside, "label": None if known else _literal(label, 48)}
            ax.plot(*zip(*curve, strict=True), **look)
    if chains:
        ax.set_xlim(left=ax.get_xlim()[0] / 2 ** (0.6 * len(chains)))
    return sizes


def plot_tau_vs_step(runs: Sequence[Json]) -> Figure:
    """tau by training step: a panel each for the chain and the largest tree of the last results."""
    by_step = {r["checkpoint"]["step"]: r for r in runs if r["checkpoint"]["step"] is not None}
    timeline = [by_step[step] for step in sorted(by_step)]
    last = [row for rows in by_data_set(timeline[-1]).values() for row in rows]
    kinds = {r["decoder"]: kind_of(r) for r in sorted(last, key=nodes_of)}
    kinds.pop("autoregressive", None)
    steps = f"steps {min(by_step)} to {max(by_step)}"
    figure, axes = _figure(
        timeline[-1], "Acceptance length over training", BANDS, max(1, len(kinds)), steps
    )
    for ax, kind in zip(axes, sorted(kinds.values(), reverse=True), strict=False):
        for index, name in enumerate(by_data_set(timeline[-1])):
            rows = [(r["checkpoint"]["step"], by_data_set(r).get(name, [])) for r in timeline]
            points = [(step, row) for step, group in rows for row in group if kind_of(row) == kind]
            _line(ax, points, index, label=_literal(name, 32))
        ax.set(title=kind, xlabel="optimizer step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set(ylabel=TAU_AXIS, ylim=(1, None))
    _legend(axes[-1])
    return figure


def plot_acceptance_by_position(results: Json) -> Figure:
    """How often the chain's first, second, ... drafted token was accepted."""
    note = "a draft counts only after all before it; no interval; white markers: too few rounds or prompts"
    figure, (ax,) = _figure(results, "Acceptance by position, DFlash chain", note)
    for index, (name, rows) in enumerate(by_data_set(results).items()):
        for row in (r for r in rows if r["decoder"] == "dflash"):
            shares = row["accept_at_position"]
            look = _style(index) | ({} if row["reliable"] else {"markerfacecolor": "white"})
            ax.plot(range(1, len(shares) + 1), shares, label=_literal(name, 32), **look)
    ax.set(xlabel="drafted token", ylabel="share of rounds that accepted it", ylim=(0, 1))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(ax)
    return figure


def plot_time_per_phase(results: Json) -> Figure:
    """What a round of each decoder costs, from drafting to committing, as stacked bars."""
    note = "mean over the rounds of all data sets, after warm-up, without the prefill; no interval"
    figure, (ax,) = _figure(results, "Time per round", note)
    times = phase_times(results)
    names = [t.decoder + ("" if t.rounds >= MIN_ROUNDS else ", few rounds") for t in times]
    places, lefts = range(len(times)), [0.0] * len(times)
    known = [p for p in PHASES if any(t.phases.get(p) for t in times)]
    others = dict.fromkeys(p for t in times for p in t.phases if p not in PHASES)
    for phase, colour in zip([*known, *others], COLOURS, strict=False):
        widths = [t.phases.get(phase, 0.0) * 1000 for t in times]
        ax.barh(places, widths, 0.6, lefts, color=colour, label=_literal(phase, 32), zorder=2)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, (left, time) in enumerate(zip(lefts, times, strict=True)):
        text = f" {_short(left)} ms, {_short(left / time.tau)} ms a token"
        ax.text(left, place, text, va="center", fontsize=9)
    ax.set(xlabel="milliseconds per round", xlim=(0, max(lefts) * 1.7 or 1))
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    _legend(ax)
    return figure


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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


def _figure(
    results: Json, title: str, note: str, panels: int = 1, steps: str | None = None
) -> tuple[Figure, Sequence[Axes]]:
    """Every figure says what was measured: target, checkpoint, mode and decoding above, interval and data below."""
    figure = Figure(figsize=(3.5 + 4.5 * panels, 5), dpi=150, layout="constrained")
    figure.suptitle(f"{title}\n{_literal(subject(results, steps), 80)}", fontsize=12)
    data = textwrap.wrap(data_of(results), 100, max_lines=3, placeholder=" ...")
    text = "\n".join([note, *(_literal(line, 100) for line in data)])
    figure.supxlabel(text, fontsize=8, color="0.35")
    axes: Sequence[Axes] = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(ax: Axes) -> None:
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def plots_of(results: Json, history: Sequence[Json]) -> dict[str, Callable[[], Figure]]:
    """The plots there is something to draw for: file name to what draws it."""
    decoders = {row["decoder"] for rows in by_data_set(results).values() for row in rows}
    timeline = timeline_of(results, history)
    plots: dict[str, Callable[[], Figure]] = {}
    if "ddtree" in decoders:
        plots["tau_vs_budget"] = lambda: plot_tau_vs_budget(results)
    if len(timeline) > 1 and decoders & {"dflash", "ddtree"}:
        plots["tau_vs_step"] = lambda: plot_tau_vs_step(timeline)
    if "dflash" in decoders:
        plots["acceptance_by_position"] = lambda: plot_acceptance_by_position(results)
    if phase_times(results):
        plots["time_per_phase"] = lambda: plot_time_per_phase(results)
    return plots


def write_plots(folder: Path, plots: dict[str, Callable[[], Figure]]) -> None:
    """Draw each and save it in every format."""
    for name, draw in plots.items():
        figure = draw()
        for suffix in FORMATS:
            # Drawn beside and renamed: a reader of a run in progress never sees half a picture.
            temporary = folder / f".{name}.tmp-{os.getpid()}"
            figure.savefig(temporary, format=suffix)
            temporary.replace(folder / f"{name}.{suffix}")
