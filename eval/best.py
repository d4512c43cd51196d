"""Which checkpoint of a run is the best: the one whose chain replays the highest tau on the held-out sets.

Replay decides, which every checkpoint gets, and only results of the same settings are compared. A result whose checkpoint
is gone, or has other weights by now, does not count.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from configs.schema import Config
from eval.done import fingerprint_of
from eval.metrics import Json
from eval.results import latest_results
from train.checkpoint import record_best
from train.finished import complete_checkpoints


def choose_best(run_dir: Path, config: Config, settings: str) -> str | None:
    """Record the best checkpoint among those evaluated with `settings`; returns a line to print, None without any."""
    wanted = config.eval.best_by
    by = f"chain, {wanted or 'mean over the held-out sets'}"
    there = {folder.name: folder for folder in complete_checkpoints(run_dir)}
    scored = []
    for results in latest_results(run_dir):
        checkpoint = results["checkpoint"]
        folder, tau = there.get(Path(checkpoint["path"]).name), chain_tau(results, wanted)
        comparable = (results["mode"], results.get("settings")) == ("replay", settings)
        if comparable and folder and tau is not None:
            scored.append((tau, checkpoint["step"], folder, checkpoint["fingerprint"]))
    for tau, _, folder, weights in sorted(scored, reverse=True):  # of equals the latest
        if fingerprint_of(folder) == weights and record_best(run_dir, folder, tau, by):
            return f"best of {len(scored)}: {folder.name}, tau {tau:.3f} ({by})"
    return None


def chain_tau(results: Json, wanted: str | None) -> float | None:
    """tau of the chain on a set, or its mean over all sets; None when there is none, or a set without rounds."""
    taus = [
        row["tau"]
        for row in results["rows"]
        if row["decoder"] == "dflash" and wanted in (None, row["dataset"])
    ]
    return None if not taus or None in taus else fmean(taus)
