"""The model card of a checkpoint."""

from __future__ import annotations

from configs.schema import Config
from extract.manifest import Manifest, Totals


def model_card(config: Config, manifest: Manifest, data: Totals, step: int) -> str:
    """README.md: what it drafts for, every convention, how it was made and how it is served."""
    drafter, taps = config.drafter, list(manifest.target_layer_ids)
    return f"""---
library_name: transformers
tags: [dflash, speculative-decoding, paceline]
---

# DFlash drafter for {manifest.target.id}

| | |
|---|---|
| drafts for | {manifest.target.id} (weights fingerprint `{manifest.target.fingerprint}`) |
| block size | {drafter.block_size} (slot 0 is the last accepted token, {drafter.block_size - 1} drafts) |
| layers | {drafter.num_layers} |
| taps | {taps}: {manifest.tap_convention} |
| mask token | {manifest.mask_token_id} |
| thinking mode | {manifest.enable_thinking} |
| trained on | {data.samples} samples, {data.supervised_tokens:,} answer tokens ({manifest.answers.source}) |
| step | {step}, seed {config.seed}, {config.train.optimizer} {config.train.learning_rate:g} |

Trained with Paceline. Acceptance lengths: `evals/step-{step:06d}/report.md` of the run folder.
"""
