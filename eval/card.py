"""The acceptance lengths of a checkpoint in its model card (train/card.py leaves a place for them)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configs.provenance import atomic_write_text
from eval.metrics import Json
from eval.results import decoder_name
from eval.tables import markdown_table, tau_cell
from train.card import ACCEPTANCE

NOTE = (
    "tau is the number of tokens per verification round **with** the bonus token, pooled over rounds; the interval is a "
    "95 % bootstrap over prompts. *replay* reads it off the target's stored greedy answers, *live* decodes, *served* is "
    "an engine's own count."
)


def add_to_card(checkpoint: Path, evaluations: Sequence[Json]) -> bool:
    """Put tau per data set into README.md. evaluations: results.json of this checkpoint's weights, a mode each.

    False, and nothing is written, for a folder whose card has no place for it. Rows that are not lossless stay out.
    """
    file = checkpoint / "README.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    before, start, rest = text.partition(ACCEPTANCE[0])
    _, end, after = rest.partition(ACCEPTANCE[1])
    if not start or not end:
        return False
    table = [["data set", "decoder", "mode", "tau [95 %]", "prompts", "answers up to"]]
    table += [
        [
            row["dataset"],
            decoder_name(row),
            results["mode"],
            tau_cell(row) + ("" if row["reliable"] else " (few rounds)"),
            str(row["prompts"]),
            f"{results.get('max_new_tokens') or '?'} tokens",
        ]
        for results in evaluations
        for row in results["rows"]
        if row["decoder"] != "autoregressive" and row["lossless"] is not False
    ]
    if len(table) == 1:
        return False
    shown = f"\n{markdown_table(table, '<<<>>>')}\n\n{NOTE}\n"
    atomic_write_text(file, f"{before}{start}{shown}{end}{after}")
    return True
