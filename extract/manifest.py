"""What a states folder holds and what made it: manifest.json, written by extract and read by all.

    manifest = read_manifest(run_dir / "states")
    require(manifest, run_dir / "states", target_layer_ids=(1, 8), mask_token_id=151669)

No torch here: a launcher may look too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import to_jsonable_python

from configs.load import UserError
from configs.provenance import atomic_write_json
from configs.schema import Config

SCHEMA: Final = 1
TAP_CONVENTION = "residual stream after block i, before any final norm"
MANIFEST = "manifest.json"
AGAIN = "run extract/main.py again with the same config"


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
        raise ValueError(f"{name!r} is not the plain name of a file in this folder")
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Quarantined(Record):
    """A sample that was planned for a shard and left out of it: its states must not be trained on."""

    id: str
    reason: str


class ShardEntry(Record):
    """One finished shard; also what its sidecar (shard-000000.json) holds."""

    file: FileName
    samples: int = Field(ge=0)
    tokens: int = Field(ge=0)
    supervised_tokens: int = Field(ge=0)
    bytes: int = Field(gt=0)
    sha256: Sha256
    plan_fingerprint: str
    quarantined: tuple[Quarantined, ...] = ()


class Totals(Record):
    samples: int
    tokens: int
    supervised_tokens: int
    bytes: int

    @classmethod
    def of(cls, shards: Sequence[ShardEntry]) -> Totals:
        return cls(**{name: sum(getattr(s, name) for s in shards) for name in cls.model_fields})


class TargetInfo(Record):
    id: str
    revision: str | None
    fingerprint: str


class Answers(Record):
    """Where the answers come from. Replay is exact for the target's own greedy ones alone."""

    source: Literal["regenerated", "given", "server"]
    greedy: bool
    max_new_tokens: int | None
    temperature: float | None


class TargetHead(Record):
    """The target's final norm and head, stored beside the shards."""

    file: FileName
    sha256: Sha256


class Manifest(Record):
    schema_version: Literal[1] = Field(SCHEMA, alias="schema")
    complete: bool
    target: TargetInfo
    tokenizer_hash: str
    template_hash: str
    enable_thinking: bool | None
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    tap_convention: str = TAP_CONVENTION
    hidden_size: int = Field(gt=0)
    num_target_layers: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    storage_dtype: Literal["bfloat16", "float32", "float8_e4m3fn"]
    target_dtype: Literal["bfloat16", "float32"]
    mask_token_id: int = Field(ge=0)
    answers: Answers
    last_hidden: bool
    data_fingerprint: str
    plan_fingerprint: str
    target_head: TargetHead | None
    shards: tuple[ShardEntry, ...]
    totals: Totals

    @property
    def quarantined(self) -> list[Quarantined]:
        return [sample for entry in self.shards for sample in entry.quarantined]

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        ids = list(self.target_layer_ids)
        if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_target_layers:
            raise ValueError(
                f"target_layer_ids {ids} are not increasing ids of a target with "
                f"{self.num_target_layers} layers"
            )
        if self.tap_convention != TAP_CONVENTION:
            raise ValueError(
                f"tap_convention is {self.tap_convention!r} and must be {TAP_CONVENTION!r}"
            )
        names = [entry.file for entry in self.shards]
        if names != sorted(set(names)):
            raise ValueError(f"shards are listed twice or out of order: {names}")
        for entry in self.shards:
            if entry.plan_fingerprint != self.plan_fingerprint:
                raise ValueError(
                    f"{entry.file} belongs to plan {entry.plan_fingerprint} and the manifest to "
                    f"{self.plan_fingerprint}"
                )
        if self.totals != (summed := Totals.of(self.shards)):
            raise ValueError(f"totals are {self.totals} and the shards add up to {summed}")
        return self


def write_manifest(folder: Path, manifest: Manifest) -> None:
    atomic_write_json(folder / MANIFEST, manifest.model_dump(mode="json", by_alias=True))


def read_manifest(folder: Path, *, incomplete_ok: bool = False) -> Manifest:
    """Return the checked manifest of a states folder. Raises UserError, one sentence with the fix.

    An incomplete one, which extract leaves when it is interrupted, is refused unless incomplete_ok.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"there is no states folder {folder}; run extract/main.py first")
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder} has no {MANIFEST}; {AGAIN} to finish it") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions") from None
    except ValidationError as error:
        raise UserError(f"{path} {_explain(error)}") from None
    if not manifest.complete and not incomplete_ok:
        raise UserError(
            f"the states in {folder} are incomplete ({manifest.totals.samples} samples so far); "
            f"{AGAIN} to finish them"
        )
    return manifest


def is_complete(folder: Path) -> bool:
    """Whether a states folder is there and finished. UserError when its manifest is damaged."""
    return (folder / MANIFEST).exists() and read_manifest(folder, incomplete_ok=True).complete


def held_out_folders(config: Config) -> dict[str, Path]:
    """The states of every set in eval.prompts, by the set's name, there or not."""
    root = Path(config.run_dir) / "eval-sets"
    return {Path(name).stem: root / Path(name).stem / "states" for name in config.eval.prompts}


def _explain(error: ValidationError) -> str:
    details = error.errors(include_url=False)
    for detail in details:
        found = detail["input"]
        if detail["loc"] == ("schema",) and isinstance(found, int) and found > SCHEMA:
            return f"has schema {found} and this program reads up to {SCHEMA}; update Paceline"
    first = details[0]
    where = ".".join(str(part) for part in first["loc"])
    what = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    return f"is malformed: {where}{': ' if where else ''}{what}; delete it and {AGAIN}"


def require(manifest: Manifest, folder: Path, /, **expected: object) -> None:
    """Raise UserError, with both values of each, if fields differ from what is expected.

    A field of a field has a dotted name: `**{"target.fingerprint": "..."}`.
    """
    differences = []
    for name, value in expected.items():
        made: Any = to_jsonable_python(reduce(getattr, name.split("."), manifest))
        wanted: Any = to_jsonable_python(value)
        if made != wanted:
            differences.append(f"{name}={json.dumps(made)}, the config says {json.dumps(wanted)}")
    if differences:
        raise UserError(
            f"states in {folder} were made with {', and with '.join(differences)}; extract again "
            "into another run_dir or change the config"
        )
