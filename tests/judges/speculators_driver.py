"""Let vLLM's `speculators` 0.9.0 read our export and convert our checkpoint, in an interpreter of its own.

    python speculators_driver.py EXPORT CHECKPOINT TARGET OUT

OUT gets loaded.safetensors (what its loader made of EXPORT), config.json (what it understood) and converted/ (what its
own converter makes of CHECKPOINT).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file
from speculators.convert.dflash import DFlashConverter
from speculators.models.dflash import DFlashDraftModel


def main(export: str, checkpoint: str, target: str, out: str) -> None:
    model, info = DFlashDraftModel.from_pretrained(export, output_loading_info=True), {}
    if isinstance(model, tuple):
        model, info = model
    problems = {k: sorted(map(str, v)) for k, v in info.items() if v and k != "missing_keys"}
    assert not problems, f"speculators does not load this export whole: {problems}"
    state = {k: v.contiguous().clone() for k, v in model.state_dict().items()}
    save_file(state, Path(out) / "loaded.safetensors")
    understood = {
        name: getattr(model.config, name)
        for name in (
            "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sample_from_anchor",
            "sliding_window_non_causal", "draft_vocab_size",
        )
    }  # fmt: skip
    understood["verifier"] = model.config.speculators_config.verifier.name_or_path
    understood["layer_types"] = model.config.transformer_layer_config.layer_types
    (Path(out) / "config.json").write_text(json.dumps(understood))
    DFlashConverter().convert(checkpoint, Path(out) / "converted", base_model=target)


if __name__ == "__main__":
    main(*sys.argv[1:])
