"""Results to wandb, on the training-step axis whenever they arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.schema import Config
from train.tracking import finish_wandb, log_wandb, start_wandb


def log_results(run_dir: Path, config: Config, results: dict[str, Any]) -> None:
    """tau of every data set and decoder as eval/MODE/DATASET/DECODER, at the checkpoint's training step."""
    run = start_wandb(run_dir, config, "eval")
    if run is None:
        return
    values: dict[str, Any] = {"eval/step": results["checkpoint"]["step"] or 0}
    for row in results["rows"]:
        decoder = row["decoder"] if row["budget"] is None else f"{row['decoder']}-{row['budget']}"
        values[f"eval/{results['mode']}/{row['dataset']}/{decoder}"] = row["tau"]
    log_wandb(run, values)
    finish_wandb(run)
