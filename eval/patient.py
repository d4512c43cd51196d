"""What the doctor looks at, and how it says what it found (eval/doctor.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from configs.load import UserError
from configs.schema import Config
from eval.loading import load_checked, open_sets
from eval.variants import Hits, clearly_better, hits
from extract.head import load_head
from extract.manifest import MANIFEST, require
from extract.shards import Sample, ShardReader
from extract.target import DTYPES, Target, load_target, pick_device
from extract.window import released_in
from train.drafter import DFlashDrafter
from train.layout import expected_of_states

SAMPLES = 16  # of the training states and of all held-out sets together: some thousand tokens

OK, SUSPECT, UNKNOWN = "ok", "SUSPECT", "not checkable here"
TRAINING = "training states"
TOO_SHORT = "no answer is longer than a block"


@dataclass(frozen=True)
class Finding:
    """What a check found. `why`: a suspect's likeliest cause and its fix, or what keeps the check from being made."""

    name: str
    verdict: str
    measured: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name + ':':<11}{self.verdict:<8}" + "; ".join(
            filter(None, (self.measured, self.why))
        )


class NotCheckable(Exception):  # noqa: N818  (nothing is wrong)
    """A check lacks what it needs; the reason."""


class Case:
    """A checkpoint, the states it was trained on where they are still there, the held-out ones, its target."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder, self.run_dir = config, folder, Path(config.run_dir)
        device, self.dtype = pick_device(config.target.device), DTYPES[config.eval.dtype]
        self.held_out = open_sets(config)
        self.drafter: DFlashDrafter = load_checked(folder, {}, device, self.dtype)
        self.sets = dict(self.held_out)
        states = self.run_dir / "states"
        if (states / MANIFEST).exists() and not released_in(states):
            self.sets = {TRAINING: ShardReader(states), **self.sets}
        for reader in self.sets.values():
            wanted = expected_of_states(self.drafter.config, self.drafter.shape)
            if len(wanted["target_layer_ids"]) == len(reader.manifest.target_layer_ids):
                del wanted["target_layer_ids"]  # which are this doctor's affair
            require(reader.manifest, reader.folder, **wanted)
        self.head = load_head(
            next(iter(self.held_out.values())).folder, device=device, dtype=self.dtype
        )
        share = -(-SAMPLES // len(self.held_out))
        self.read = {
            name: some(reader, SAMPLES if name == TRAINING else share)
            for name, reader in self.sets.items()
        }
        self.bad_rows = {
            name: {s.id: bad for s in samples if (bad := bad_rows(s, self.taps(name)))}
            for name, samples in self.read.items()
        }

    def taps(self, name: str) -> tuple[int, ...]:
        return self.sets[name].manifest.target_layer_ids

    def sound(self, *names: str) -> list[Sample]:
        """The samples of these sets (default: of all) whose states can be read. NotCheckable without one."""
        out = [s for n in names or self.read for s in self.read[n] if s.id not in self.bad_rows[n]]
        if not out:
            raise NotCheckable(f"no sample of {' or '.join(names or self.read)} has sound states")
        return out

    @cached_property
    def target(self) -> Target:
        """Loaded when the first check asks. NotCheckable with the reason when it cannot be."""
        if self.config.extract.backend == "vllm":
            raise NotCheckable(
                "extract.backend=vllm loads no target; --set extract.backend=hf does"
            )
        try:
            return load_target(self.config.target, dtype=self.config.eval.dtype)
        except UserError as error:
            raise NotCheckable(f"it needs the target: {error}") from None

    @cached_property
    def hits(self) -> Hits:
        """Of the drafter as it is, on all sound samples. NotCheckable when none has room for a block."""
        found = hits(self.drafter, self.head, self.sound(), (-1, 0, 1))
        if not found.blocks:
            raise NotCheckable(TOO_SHORT)
        return found

    def prefers(self, other: DFlashDrafter) -> tuple[float, bool]:
        """(accuracy of this variant, whether it is clearly better)."""
        found = hits(other, self.head, self.sound()).accuracy()
        return found, clearly_better(found, self.hits.accuracy(), self.hits.independent)


def some(reader: ShardReader, count: int) -> list[Sample]:
    """At most `count` samples, evenly spaced. Borrowed: reading refuses NaN, which is one of the things looked for."""
    numbers = sorted({k * len(reader) // count for k in range(count)})
    return [reader.borrow(i) for i in numbers] if len(reader) else []


def bad_rows(sample: Sample, taps: Sequence[int]) -> dict[str, int]:
    """Rows that no target makes, by what is wrong with them."""
    rows = sample.hidden_states.float().unflatten(-1, (len(taps), -1))  # [T, taps, H]
    finite = rows.isfinite().all(-1).all(-1)
    constant = (rows.amax(-1) == rows.amin(-1)).any(-1) & finite
    # A token's embedding is part of its states, so two tokens never share a row; the same one may, in a run of it.
    sound = finite & ~constant
    _, row = rows[sound].flatten(1).unique(dim=0, return_inverse=True)
    pairs = torch.stack([row, sample.input_ids[sound].long()]).unique(dim=1)
    found = {
        "NaN or Inf": int((~finite).sum()),
        "zero or constant": int(constant.sum()),
        "equal to another token's": pairs.shape[1] - len(row.unique()),
    }
    return {what: count for what, count in found.items() if count}
