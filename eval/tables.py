"""Tables for the terminal, for Markdown and for LaTeX, and the one that tells at a look: data sets by decoders."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from eval.metrics import DECODERS, MIN_PROMPTS, MIN_ROUNDS, Json
from eval.results import by_data_set, decoding, nodes_of, published_of, step_name, target_name

Table = Sequence[Sequence[str]]  # the headings, then the rows
FEW = f"fewer than {MIN_ROUNDS} rounds or {MIN_PROMPTS} prompts"


def fixed(value: float | None, digits: int = 2) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def aligned(table: Table, sides: str) -> str:
    """A table for the terminal. sides: `<` or `>` for each column."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [zip(cells, widths, sides, strict=True) for cells in table]
    return "\n".join("  ".join(f"{c:{s}{w}}" for c, w, s in line).rstrip() for line in lines)


def markdown_table(table: Table, sides: str) -> str:
    """The same in Markdown, which no cell can break."""
    lines = [[escaped(cell) for cell in cells] for cells in table]
    lines.insert(1, [{"<": ":--", ">": "--:"}[side] for side in sides])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def escaped(text: str) -> str:
    """Text as one line that Markdown leaves as it is."""
    return re.sub(r"([\\`*_|<>])", r"\\\1", " ".join(text.split()))


def tex_escaped(text: str) -> str:
    """Text as one line that LaTeX prints as it is."""
    words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    words |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
    return re.sub(
        r"[\\~^<>|&%$#_{}]", lambda m: words.get(m[0], "\\" + m[0]), " ".join(text.split())
    )


Column = tuple[str, int | None]  # decoder and budget


@dataclass(frozen=True)
class Line:
    """A line of the overview: a data set as measured, or as somebody else published it."""

    name: str
    rows: dict[Column, Json]
    source: str | None = None
    published: dict[Column, float] | None = None


def overview(results: Json) -> tuple[list[Column], list[Line]]:
    """The drafting decoders by size, and a line for each data set, below it what others published."""
    columns: dict[Column, int] = {}
    lines = []
    for name, group in by_data_set(results).items():
        rows = {(r["decoder"], r["budget"]): r for r in group if r["decoder"] != "autoregressive"}
        if not rows:
            continue
        columns |= {column: nodes_of(row) for column, row in rows.items()}
        lines.append(Line(name, rows))
        sources: dict[str, dict[Column, float]] = {}
        for point in published_of(results, group):
            sources.setdefault(point.source, {})[point.decoder, point.budget] = point.tau
        lines += [Line(name, {}, source, taus) for source, taus in sources.items()]
    in_order = sorted(columns, key=lambda c: (DECODERS.index(c[0]), columns[c]))
    shown = [x for x in lines if x.published is None or x.published.keys() & columns.keys()]
    return in_order, shown


def tau_cell(row: Json) -> str:
    """tau and its interval."""
    return fixed(row["tau"]) + (" [{:.2f}, {:.2f}]".format(*row["ci95"]) if row["ci95"] else "")


def overview_markdown(results: Json) -> str:
    """The overview for report.md; nothing where no drafting decoder was measured."""
    columns, lines = overview(results)
    if not lines:
        return ""
    headings = [_heading(c) for c in columns]
    table = [["tau [95 %]", *headings]]
    for line in lines:
        rows, published = line.rows, line.published or {}
        cells = [
            tau_cell(rows[c]) + " †" * (not rows[c]["reliable"])
            if c in rows
            else fixed(published.get(c))
            for c in columns
        ]
        table.append([line.name if line.source is None else f"{line.name}, {line.source}", *cells])
    text = markdown_table(table, "<" + ">" * len(columns))
    return text + f"\n\n† {FEW}" * ("†" in text)


def _heading(column: Column) -> str:
    decoder, budget = column
    name = {"dflash": "DFlash", "ddtree": "DDTree"}[decoder]
    return name if budget is None else f"{name} {budget}"


def latex(results: Json) -> str:
    """The overview for a paper: a table environment for booktabs and graphicx."""
    columns, lines = overview(results)
    head = "% tau by data set and decoder. Needs \\usepackage{booktabs,graphicx}.\n"
    if not lines:
        return head + "% Nothing to show: no lossless rounds of a drafting decoder were measured.\n"
    body = []
    for line in lines:
        rows, published = line.rows, line.published or {}
        cells = [
            _tex_cell(rows[c]) if c in rows else _tex_number(published.get(c)) for c in columns
        ]
        name = line.name if line.source is None else line.source
        label = tex_escaped(name) if line.source is None else rf"\quad\emph{{{tex_escaped(name)}}}"
        body.append(" & ".join([label, *cells]) + r" \\")
    few = any(not row["reliable"] for line in lines for row in line.rows.values())
    caption = (
        rf"Acceptance length $\tau$ (tokens per verification round, bonus token included) for "
        rf"{tex_escaped(target_name(results))}, {tex_escaped(step_name(results))}, "
        rf"{tex_escaped(decoding(results))} decoding. In brackets: 95\,\% bootstrap interval over prompts."
        + rf" $^\dagger$ {FEW}."
        * few
    )
    tabular = "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
            r"\toprule",
            " & ".join(["Data set", *map(_heading, columns)]) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )
    # The idiom shrinks a table that is wider than the text and leaves any other alone.
    fitted = (
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%" + f"\n{tabular}" + "}"
    )
    return head + "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{caption}}}",
            r"\label{tab:acceptance-length}",
            fitted,
            r"\end{table}",
            "",
        ]
    )


def _tex_number(value: float | None) -> str:
    return "--" if value is None else f"${value:.2f}$"


def _tex_cell(row: Json) -> str:
    """$8.61_{[8.40,\\,8.82]}$, with a dagger where it is not reliable."""
    low_high = r"_{{[{:.2f},\,{:.2f}]}}".format(*row["ci95"]) if row["ci95"] else ""
    dagger = "" if row["reliable"] else r"^{\dagger}"
    return f"${row['tau']:.2f}{dagger}{low_high}$"
