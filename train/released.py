"""What drafter folders of other projects say of themselves, brought into one form.

    z-lab, SpecForge        architectures DFlashDraftModel; taps, mask token and the rest at the top level or, which wins,
                            in `dflash_config`; tap i is the residual stream after block i
    vLLM speculators        speculators_model_type dflash; the layers' config nested; aux layer id = tap + 1
    deepseek-ai dflash_*    architectures Qwen3DSparkModel; slot 0 drafts too, unless `sample_from_anchor` denies it

A setting that would change the drafter's arithmetic and that train/drafter.py does not have is refused by its name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, Qwen3Config

from train.drafter import FULL, SLIDING, DraftShape

TARGETS_OWN = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "t2d", "d2t")
DFLASH_2 = (
    "{file} is a DFlash 2 drafter (convolutions around every sublayer and a candidate selector), which cannot be "
    "loaded or trained here yet; use a DFlash drafter of the same target"
)
# settings by name: the values that change nothing, and what any other value means
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "shift_label": ((None, False), "lets every slot predict the token after it"),
    "markov_rank": ((None, 0), "has a Markov head"),
    "enable_confidence_head": ((None, False), "has a confidence head"),
    "projector_type": ((None, "dflash"), "has another head on top of its logits"),
    "attention_sink_bias": ((None, False), "has attention sinks"),
    "add_swa_attention_sink_bias": ((None, False), "has attention sinks"),
    "attention_value_scale": ((None, 1, 1.0), "scales its values"),
    "use_swa": ((None, False), "has sliding layers that layer_types does not name"),
    "use_aux_hidden_state": ((None, True), "reads no taps"),
    "is_neox_style": ((None, True), "rotates interleaved pairs"),
    "rope_is_neox_style": ((None, True), "rotates interleaved pairs"),
    "logit_scale": ((None, 1, 1.0), "scales its logits by logit_scale"),
    "quantization_config": ((None,), "is quantized"),
}
KNOWN = {
    "block_size", "mask_token_id", "mask_token", "sample_from_anchor", "target_layer_ids", "num_target_layers",
    "causal", "num_anchors",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping", "swa_window_size", *UNSUPPORTED,
}  # fmt: skip


class Released(NamedTuple):
    config: Qwen3Config
    shape: DraftShape
    targets_own: tuple[str, ...]  # prefixes of tensors that are copies of the target's


def read_released(folder: Path) -> Released:
    """config.json of a drafter folder of any known layout. Raises ValueError, in one sentence, for what it cannot be."""
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} is not a drafter checkpoint: it has no config.json")
    raw: dict[str, Any] = json.loads(path.read_text())
    file = str(path)
    architectures = raw.get("architectures") or []
    kind = raw.get("speculators_model_type")
    nested = raw.get("dflash_config") or {}
    if (
        kind == "dflash2"
        or "DFlash2DraftModel" in architectures
        or "conv_kernel_size" in nested | raw
    ):
        raise ValueError(DFLASH_2.format(file=file))
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            f"{folder} has a mask embedding of its own (mask_embedding.pt), which is not supported"
        )
    if kind is not None:
        return _speculators(file, raw)
    if "Qwen3DSparkModel" in architectures:
        file = f"{file} (Qwen3DSparkModel)"
        raw.setdefault("sample_from_anchor", True)
    elif "DFlashDraftModel" not in architectures:
        raise ValueError(
            f"{file} is of architecture {architectures}; only DFlashDraftModel and the speculators layout can be read"
        )
    if unknown := [f"{k}={v}" for k, v in nested.items() if k not in KNOWN and v]:
        raise ValueError(
            f"{file} has dflash_config settings that are not known here: {', '.join(unknown)}; "
            "remove them if they do not change what the drafter computes"
        )
    # nested wins, as in z-lab's code and the engines; is_causal is read at the top level only
    said = raw | nested
    is_causal = raw.get("is_causal")
    is_causal = nested.get("causal") if is_causal is None else is_causal
    sliding = SLIDING in (raw.get("layer_types") or [])
    return _checked(
        file,
        raw,
        said,
        causal_sliding=sliding and (is_causal is None or bool(is_causal)),
        causal_full=bool(is_causal),
    )


def _speculators(file: str, raw: dict[str, Any]) -> Released:
    if raw["speculators_model_type"] != "dflash":
        raise ValueError(
            f"{file} is a speculator of type {raw['speculators_model_type']}, not dflash"
        )
    layers = raw.get("transformer_layer_config")
    aux = raw.get("aux_hidden_state_layer_ids")
    if not isinstance(layers, dict) or not aux:
        raise ValueError(f"{file} lacks transformer_layer_config or aux_hidden_state_layer_ids")
    # it keeps only what differs from the defaults of its own model type
    full = AutoConfig.for_model(
        layers.get("model_type", "qwen3"), **{k: v for k, v in layers.items() if k != "model_type"}
    ).to_dict()
    vocabulary = raw.get("draft_vocab_size")
    if vocabulary not in (None, full["vocab_size"]):
        raise ValueError(
            f"{file} drafts from a reduced vocabulary (draft_vocab_size {vocabulary} of {full['vocab_size']}), "
            "which is not supported"
        )
    width = raw.get("target_hidden_size")
    if width not in (None, full["hidden_size"]):
        raise ValueError(
            f"{file} is {full['hidden_size']} wide and its target {width} (target_hidden_size), which is not supported"
        )
    if min(aux) < 1:
        raise ValueError(
            f"{file} reads the target's embedding (aux layer id {min(aux)}), which is not supported"
        )
    sliding = SLIDING in (full.get("layer_types") or [])
    said = full | raw | {"target_layer_ids": [i - 1 for i in aux]}
    return _checked(
        file,
        full,
        said,
        causal_sliding=sliding and not raw.get("sliding_window_non_causal", False),
        causal_full=False,
        optional=("num_target_layers",),
    )._replace(targets_own=TARGETS_OWN)


def _checked(
    file: str,
    layers: dict[str, Any],
    said: dict[str, Any],
    *,
    causal_sliding: bool,
    causal_full: bool,
    optional: tuple[str, ...] = (),
) -> Released:
    """layers: what Qwen3Config reads; said: every other setting, by its z-lab name."""
    for name, (harmless, meaning) in UNSUPPORTED.items():
        if said.get(name) not in harmless:
            raise ValueError(
                f"{file} {meaning} ({name}={json.dumps(said[name])}), which is not supported"
            )
    needed = ("block_size", "num_target_layers", "mask_token_id", "target_layer_ids")
    if missing := [n for n in needed if said.get(n) is None and n not in optional]:
        raise ValueError(f"{file} lacks {', '.join(missing)}")
    if layers.get("rope_parameters") is None and layers.get("rope_theta") is None:
        raise ValueError(
            f"{file} names no rope_theta, and engines differ in what they take for it; add rope_parameters"
        )
    config: Any = Qwen3Config.from_dict(layers)
    rope = config.rope_parameters
    if not {FULL, SLIDING}.isdisjoint(rope) or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{file} has rope_parameters that are not supported: {rope}")
    if others := sorted(set(config.layer_types) - {FULL, SLIDING}):
        raise ValueError(f"{file} has layers of type {', '.join(others)}, which is not supported")
    if SLIDING in config.layer_types:
        window = config.sliding_window
        if window is None:
            raise ValueError(
                f"{file} has sliding layers and no window; set sliding_window and use_sliding_window=true"
            )
        if said.get("swa_window_size") not in (None, window):
            raise ValueError(
                f"{file} has sliding_window {window} and swa_window_size {said['swa_window_size']}; keep one"
            )
        if window < said["block_size"]:
            raise ValueError(
                f"{file} has a sliding window of {window}, shorter than its block of {said['block_size']}, "
                "which is not supported"
            )
    taps, depth = tuple(said["target_layer_ids"]), said.get("num_target_layers")
    if min(taps) < 0 or max(taps) >= (depth or max(taps) + 1):
        raise ValueError(f"{file} has taps {list(taps)} outside the target's {depth} layers")
    cap = said.get("final_logit_softcapping")
    shape = DraftShape(
        block_size=said["block_size"],
        mask_token_id=said["mask_token_id"],
        target_layer_ids=taps,
        num_target_layers=depth,
        causal_sliding=causal_sliding,
        causal_full=causal_full,
        sample_from_anchor=bool(said.get("sample_from_anchor")),
        input_embedding_scale=float(said.get("input_embedding_scale") or 1.0),
        output_multiplier=float(said.get("output_multiplier") or 1.0),
        final_logit_softcapping=float(cap) if cap else None,
    )
    return Released(config, shape, ())
