"""The model card of a checkpoint: README.md, for a person and for the hub."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from configs.load import dump_config, resolve_input
from configs.provenance import fingerprint
from configs.schema import Config, TargetConfig
from extract.manifest import Manifest, Totals
from train.drafter import FULL, SLIDING, DFlashDrafter, DraftShape

# eval/card.py puts its table between these two
ACCEPTANCE = ("<!-- acceptance -->", "<!-- end of acceptance -->")
PATH = "PATH_OF_THIS_FOLDER"


def model_card(
    config: Config, manifest: Manifest, data: Totals, step: int, drafter: DFlashDrafter
) -> str:
    """README.md: what it drafts for, every convention, how it was made and how it is served."""
    target, shape = manifest.target, drafter.shape
    base, license_name = origin_of(config.target)
    front = {
        "base_model": base,
        "license": license_name,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dflash", "speculative-decoding", "draft-model", "paceline"],
    }
    thinking = {None: "the chat template's default", True: "on", False: "off"}
    facts = {
        "drafts for": f"{target.id}{f' at {target.revision}' if target.revision else ''}",
        "target fingerprint": f"`{target.fingerprint}`",
        "thinking mode": thinking[manifest.enable_thinking],
        "block size": f"{shape.block_size}: slot 0 is the last accepted token and predicts "
        f"{'the first' if shape.sample_from_anchor else 'nothing'}, {shape.drafts} drafts",
        "layers": _layers(drafter),
        "taps": f"{list(manifest.target_layer_ids)} of {manifest.num_target_layers}: {manifest.tap_convention}",
        "mask token": str(manifest.mask_token_id),
        "trained on": f"{data.samples:,} samples, {data.supervised_tokens:,} answer tokens, {_answers(manifest)}",
        "data fingerprint": f"`{manifest.data_fingerprint}`",
        "step": f"{step}, seed {config.seed}, {config.train.optimizer} {config.train.learning_rate:g}",
        "config fingerprint": f"`{fingerprint(config.model_dump(mode='json'))}`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    header = yaml.safe_dump({k: v for k, v in front.items() if v}, sort_keys=False)
    return f"""---
{header}---

# DFlash drafter for {target.id}

A block-diffusion drafter for speculative decoding. It has no embedding and no head: it uses the target's.

| | |
|---|---|
{table}

## Acceptance length

{ACCEPTANCE[0]}
Not evaluated yet: `python eval/main.py --config config.yaml --checkpoint {PATH}`.
{ACCEPTANCE[1]}

## Serve it

{serving(base or target.id, shape)}

## Reproduce it

    python launch/main.py run --config config.yaml

with this config.yaml (Paceline, `train/main.py`):

```yaml
{dump_config(config).strip()}
```
"""


def serving(target: str, shape: DraftShape) -> str:
    if shape.sample_from_anchor:
        return "Its slot 0 drafts as well (`sample_from_anchor`), which no engine's DFlash loader that was tried takes."
    return f"""`config.json` spells out every convention, and engines load this folder as it is.

vLLM:

    {serve_vllm(target, PATH, shape.block_size)}

SGLang:

    {serve_sglang(target, PATH, shape.block_size)}"""


def serve_vllm(target: str, drafter: str, block_size: int) -> str:
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    return f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'"


def serve_sglang(target: str, drafter: str, block_size: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {drafter} --speculative-num-draft-tokens {block_size}"
    )


def origin_of(target: TargetConfig) -> tuple[str | None, str | None]:
    """(hub id, license) of a target, as far as its folder or package tells without asking the hub."""
    if target.package is not None:
        try:
            about = metadata.metadata(target.package).json
        except metadata.PackageNotFoundError:
            return None, None
        return None, _spdx(about.get("license_expression") or about.get("license"))
    assert target.path is not None
    folder = resolve_input(target.path, None)
    if folder is None:
        return target.path, None
    front = _front_matter(folder / "README.md")
    name = front.get("model_id") or front.get("base_model")
    return (name if isinstance(name, str) else None), _spdx(front.get("license"))


def _spdx(name: Any) -> str | None:
    """As the hub writes licenses, `apache-2.0`; None for what is no short name."""
    text = str(name or "").strip().lower().replace(" ", "-")
    return text if re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,30}", text) else None


def _front_matter(file: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not (found := re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)):
        return {}
    try:
        front = yaml.safe_load(found[1])
    except yaml.YAMLError:
        return {}
    return front if isinstance(front, dict) else {}


def _layers(drafter: DFlashDrafter) -> str:
    kinds = drafter.config.layer_types
    inside = {kind: "causal" if drafter.shape.causal(kind) else "bidirectional" for kind in kinds}
    if SLIDING not in kinds:
        return f"{len(kinds)}, full attention, {inside[FULL]} inside the block"
    sliding = [i for i, kind in enumerate(kinds) if kind == SLIDING]
    others = f", the others see everything and are {inside[FULL]}" if FULL in kinds else ""
    return (
        f"{len(kinds)}; {sliding} see {drafter.config.sliding_window} positions and are {inside[SLIDING]} inside the "
        f"block{others}"
    )


def _answers(manifest: Manifest) -> str:
    answers = manifest.answers
    if answers.source == "given":
        return "answers as the data gives them"
    how = "greedily" if answers.greedy else f"at temperature {answers.temperature}"
    return f"answered by the target itself, {how}"
