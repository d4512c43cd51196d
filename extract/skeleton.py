"""The target without its weights: what extraction needs of it when another engine runs the forward.

The model is built without memory, and single modules are read from the checkpoint's safetensors files: embedding, head
and final norm to keep, a block where one is asked for. Names and fused tensors go through transformers' own loader, so
a tensor here is the tensor that `from_pretrained` would make, and the fingerprint is the loaded target's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from configs.load import UserError
from configs.schema import TargetConfig
from extract.locate import Location, load_tokenizer, locate, unpack_gguf
from extract.target import DTYPES, Target, sampled


class Skeleton(Target):
    """A target whose embedding, head and final norm are real; the blocks are not, until somebody borrows some."""

    def __init__(self, model: Any, tokenizer: Any, label: str, files: Checkpoint) -> None:
        self._files = files
        model.tie_weights()  # building without memory takes tied parameters apart
        self._names = [name for name, _ in model.named_parameters()]  # a tied head counts once
        decoder = model.get_decoder()
        kept = [model.get_input_embeddings(), model.get_output_embeddings()]
        self.norm: Any = getattr(decoder, "norm", None)
        if self.norm is not None:
            kept.append(self.norm)
        names = {id(module): name for name, module in model.named_modules()}
        for module in kept:
            files.fill(model, names[id(module)] + ".", may_lack=module is not kept[0])
        model.tie_weights()
        super().__init__(model, tokenizer, label)
        for module in kept:
            if any(p.is_meta for p in module.parameters()):
                raise UserError(
                    f"the files of {label} lack the weights of {names[id(module)]}; download the model again"
                )

    def _sampled_weights(self) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
        """Those of the loaded target: a block at a time is read and let go."""
        parts = {name: (tuple(p.shape), sampled(p)) for name, p in self._real()}
        kept = set(parts)
        for prefix in self._files.parts():
            if prefix not in kept:
                self._files.fill(self.model, prefix, may_lack=True)
                for name, p in self._real():
                    if name not in kept:
                        parts[name] = tuple(p.shape), sampled(p)
                        _forget(self.model, name)
        if lacking := [name for name in self._names if name not in parts]:
            raise UserError(
                f"the files of {self.label} lack {lacking[0]} and {len(lacking) - 1} more of its weights; "
                "download the model again"
            )
        for name in self._names:
            yield name, *parts[name]

    def _real(self) -> list[tuple[str, nn.Parameter]]:
        named = self.model.named_parameters(remove_duplicate=False)
        return [(name, p) for name, p in named if not p.is_meta]

    def first_blocks(self, input_ids: Tensor, last: int) -> Tensor:
        """[1, T] -> the residual stream [1, T, H] after block `last`, of blocks 0..last read for this one forward."""
        layers = self.layers
        stem = next(name for name, module in self.model.named_modules() if module is layers)
        try:
            for i in range(last + 1):
                self._files.fill(self.model, f"{stem}.{i}.")
            self.decoder.layers = layers[: last + 1]
            return self.forward_taps(input_ids, [last])[0]
        finally:
            self.decoder.layers = layers
            for name, _ in self._real():
                if name.startswith(f"{stem}."):
                    _forget(self.model, name)


def _forget(model: nn.Module, name: str) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    empty = torch.empty_like(getattr(module, leaf), device="meta")
    setattr(module, leaf, nn.Parameter(empty, requires_grad=False))


class Checkpoint:
    """The safetensors files of a model, by the names that its parameters have in transformers."""

    def __init__(self, model: Any, location: Location) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        self.location = location
        self._mapping: list[Any] = get_model_conversion_mapping(model)
        renamings = [m for m in self._mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in self._mapping if isinstance(m, WeightConverter)]
        state = model.state_dict()
        self._files = dict(_weight_files(location))  # checkpoint key -> file
        self._keys: dict[str, list[str]] = {}  # parameter -> checkpoint keys
        for key in self._files:
            name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
            if name not in state and key in state:
                name = key
            self._keys.setdefault(name, []).append(key)

    def parts(self) -> list[str]:
        """Prefixes of parameter names that cover the model, no larger than a block each."""

        def part(name: str) -> str:
            block = re.match(r"(.*?\.)?(layers|blocks|h)\.\d+\.", name)
            return block[0] if block else name

        return [prefix for prefix, _ in groupby(sorted(map(part, self._keys)))]

    def fill(self, model: Any, prefix: str, *, may_lack: bool = False) -> None:
        """Read every parameter whose name starts with `prefix`. UserError when one does not fit or is not there."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        keys = sorted(
            k for name, keys in self._keys.items() if name.startswith(prefix) for k in keys
        )
        by_file = groupby(sorted(keys, key=lambda k: self._files[k]), key=lambda k: self._files[k])
        tensors: dict[str, Tensor] = {}
        for file, inside in by_file:
            with safe_open(file, framework="pt") as f:
                tensors.update((key, f.get_tensor(key)) for key in inside)  # views of mapped files
        settings = LoadStateDictConfig(weight_mapping=self._mapping)
        # The last argument is `tp_plan` in transformers 5.15 and `disk_offload_index` in 5.24.
        info, _ = convert_and_load_state_dict_in_model(model, tensors, settings, None)
        model.requires_grad_(False)
        wrong = [*info.mismatched_keys, *info.conversion_errors]
        if wrong:
            raise UserError(
                f"the weights of {self.location.source} do not fit its config: {wrong[0]}"
            )
        lacking = [n for n, p in model.named_parameters() if n.startswith(prefix) and p.is_meta]
        if lacking and not may_lack:
            raise UserError(
                f"the files of {self.location.source} lack {lacking[0]}; download the model again"
            )


def _weight_files(location: Location) -> Iterator[tuple[str, str]]:
    """(key, file) of every tensor of the checkpoint. UserError when it has no safetensors files."""
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    def find(name: str) -> str | None:
        return cached_file(
            location.source,
            name,
            revision=location.revision,
            _raise_exceptions_for_missing_entries=False,
        )

    if (index := find("model.safetensors.index.json")) is not None:
        shards, _ = get_checkpoint_shard_files(
            location.source, index, revision=location.revision or "main"
        )
        by_name = {Path(shard).name: shard for shard in shards}
        weight_map: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        for key, name in weight_map.items():
            yield key, by_name[Path(name).name]
    elif (single := find("model.safetensors")) is not None:
        with safe_open(single, framework="pt") as f:
            for key in f.keys():  # noqa: SIM118 (it is no mapping)
                yield key, single
    else:
        raise UserError(
            f"{location.source} has no model.safetensors and no index of one; extract.backend=vllm reads the "
            "embedding and the head from safetensors files"
        )


def load_skeleton(config: TargetConfig) -> Skeleton:
    """The target as `load_target` gives it, on the CPU and without its blocks' weights.

    UserError when the target is quantized or its weights are not in safetensors files.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # the loader shows one for every call
    location = unpack_gguf(locate(config))
    tokenizer = load_tokenizer(config, location)
    trust = {"trust_remote_code": config.trust_remote_code, **location.kwargs()}
    model_config = AutoConfig.from_pretrained(location.source, **trust)
    if getattr(model_config, "quantization_config", None) is not None:
        raise UserError(
            f"{location.label} is quantized, and extract.backend=vllm compares unquantized weights; give the "
            "unquantized model in target.path"
        )
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            model_config,
            dtype=DTYPES[config.dtype],
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
    # Without the file it stays what the model's config says, as in from_pretrained.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(
            location.source, **location.kwargs()
        )
    return Skeleton(model, tokenizer, location.label, Checkpoint(model, location))
