"""The loaded target, frozen, and its hidden states.

Everything model-specific goes through transformers' accessors (`get_input_embeddings`, `get_output_embeddings`,
`get_decoder`, `get_text_config`), so any causal language model of transformers can be a target.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from configs.load import UserError
from configs.schema import TargetConfig
from extract.locate import from_pretrained, load_tokenizer, locate, stop_ids, unpack_gguf

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Target:
    """The loaded target, frozen, in eval mode."""

    def __init__(self, model: Any, tokenizer: Any, label: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.label = label
        self.config = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        if not isinstance(layers := getattr(self.decoder, "layers", None), nn.ModuleList):
            raise UserError(
                f"{label} is a {type(self.model).__name__}, whose blocks are not in `layers` of its decoder; "
                "such a target is not supported"
            )
        self.layers = layers
        self.embed: Any = self.model.get_input_embeddings()
        self.head: Any = self.model.get_output_embeddings()
        self.device: torch.device = self.embed.weight.device
        self.dtype: torch.dtype = self.embed.weight.dtype
        self._fingerprint: str | None = None

    @property
    def stop_ids(self) -> frozenset[int]:
        return stop_ids(self.model.generation_config, self.tokenizer)

    @torch.no_grad()
    def forward_taps(
        self, input_ids: Tensor, taps: Sequence[int], **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One decoder forward, head not run.

        input_ids [B, T] -> (features [B, T, len(taps)*hidden], last_hidden [B, T, hidden] after the final norm).
        Sequences may be padded on the right: nothing here looks ahead, so padding changes no real row.
        """
        with record_taps(self.layers, taps) as recorded:
            out = self.decoder(input_ids=input_ids, **kwargs)
        return recorded.features(self.device), out.last_hidden_state

    def logits(self, last_hidden: Tensor) -> Tensor:
        """[..., hidden] after the final norm -> [..., vocab], with the target's own soft cap."""
        logits: Tensor = self.head(last_hidden).to(
            self.device
        )  # the head of a spread target lies elsewhere
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def fingerprint(self) -> str:
        """Of the weights: names, shapes and a sample of each tensor in bfloat16, so that it does not depend on dtype.

        Taken once: the weights are frozen, and every set asks.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for name, shape, sample in self._sampled_weights():
                digest.update(f"{name}{shape}".encode())
                digest.update(sample.view(torch.uint8).numpy().tobytes())
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def _sampled_weights(self) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
        """(name, shape, `sampled` values) of each parameter, in the model's order."""
        for name, p in self.model.named_parameters():
            yield name, tuple(p.shape), sampled(p)


def sampled(weights: Tensor) -> Tensor:
    """At most 512 of a parameter's values, in bfloat16 on the CPU."""
    flat = weights.detach().reshape(-1)
    step = max(1, flat.numel() // 512)
    return flat[::step][:512].to("cpu", torch.bfloat16).contiguous()


class Recorded:
    def __init__(self, taps: Sequence[int]) -> None:
        self.taps = tuple(taps)
        self.states: dict[int, Tensor] = {}

    def features(self, device: torch.device) -> Tensor:
        """[B, T, len(taps)*hidden], taps in the order they were asked for."""
        return torch.cat([self.states[i].to(device) for i in self.taps], dim=-1)


@contextmanager
def record_taps(layers: nn.ModuleList, taps: Sequence[int]) -> Iterator[Recorded]:
    """Record the output of the given blocks during a forward.

    Hooks rather than `output_hidden_states`: that keeps every layer, and its last entry is post-norm (design 2).
    """
    recorded = Recorded(taps)

    def hook(index: int) -> Any:
        def save(_module: nn.Module, _args: Any, output: Any) -> None:
            recorded.states[index] = output[0] if isinstance(output, tuple) else output

        return save

    handles = [layers[i].register_forward_hook(hook(i)) for i in taps]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def pick_device(name: str) -> torch.device:
    """`auto` is this process's GPU where there is one. Beside a `balanced` target everything else is on the first."""
    if name in ("cuda", "balanced") and not torch.cuda.is_available():
        raise UserError(f"target.device is {name} but torch sees no GPU; use auto or cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if name == "balanced":
        return torch.device("cuda", 0)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def load_target(config: TargetConfig, *, dtype: str | None = None) -> Target:
    """Load the target's weights in `dtype` (default: target.dtype)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # a bar in a log file is a mile of carriage returns
    location = unpack_gguf(locate(config))
    tokenizer = load_tokenizer(config, location)
    device = pick_device(config.device)
    model, found = from_pretrained(
        AutoModelForCausalLM,
        config,
        location,
        dtype=DTYPES[dtype or config.dtype],
        attn_implementation=config.attn_implementation,
        output_loading_info=True,
        **({"device_map": "balanced"} if config.device == "balanced" else {}),
    )
    if lacking := sorted(found["missing_keys"]):  # transformers makes them up at random, and warns
        raise UserError(
            f"the files of {location.source} lack {lacking[0]} and {len(lacking) - 1} more of its weights; "
            "download the model again"
        )
    if config.device != "balanced":
        model = model.to(device)
    return Target(model, tokenizer, location.label)
