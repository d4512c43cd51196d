"""Whether a checkpoint has been evaluated: where its results lie and what they depend on.

No torch here: a launcher looks too, before it starts anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from configs.provenance import file_sha256, fingerprint
from configs.schema import Config
from eval.results import read_results
from extract.manifest import Manifest

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # of eval.*


def results_folder(run_dir: Path, checkpoint: Path, mode: str) -> Path:
    """evals/step-000200 for replay, which every checkpoint gets; its other results lie in folders below."""
    folder = run_dir / "evals" / checkpoint.resolve().name
    return folder if mode == "replay" else folder / mode


def lock_name(checkpoint: Path, mode: str) -> str:
    """What the one process that evaluates a checkpoint in a mode holds in the run folder (FolderLock)."""
    return f"eval-{mode}-{checkpoint.resolve().name}"


def reported(results: Path) -> bool:
    """Whether the report of these results was drawn to its end; report.md comes last."""
    report, record = results / "report.md", results / "results.json"
    return report.exists() and report.stat().st_mtime_ns >= record.stat().st_mtime_ns


def evaluated(results: Path, checkpoint: Path, settings: str) -> bool:
    """Whether these results are of these weights and were made with these settings."""
    file = results / "results.json"
    if not file.exists():
        return False
    found = read_results(file)
    return (found["checkpoint"]["fingerprint"], found.get("settings")) == (
        fingerprint_of(checkpoint),
        settings,
    )


def settings_of(
    config: Config, mode: str, manifests: Mapping[str, Manifest], server: str | None = None
) -> str:
    """A fingerprint of what a result depends on beside the drafter's weights."""
    options = {k: str(v) for k, v in config.eval.model_dump(exclude={"best_by"}).items()}
    if mode == "replay":
        for name in ("live_prompts", *SAMPLING):
            options.pop(name)
    else:
        options |= {"seed": str(config.seed), "server": str(server)}
    states = {
        name: [manifest.data_fingerprint, manifest.target.fingerprint]
        for name, manifest in manifests.items()
    }
    return fingerprint({"options": options, "states": states})


def fingerprint_of(checkpoint: Path) -> str:
    return file_sha256(checkpoint / "model.safetensors")[:16]
