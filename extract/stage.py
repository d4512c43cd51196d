"""One set of chats to one states folder: answers, checks, states. What training and held-out sets have in common."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.load import UserError
from configs.provenance import fingerprint
from configs.schema import Config
from extract.choose import Sampler
from extract.connector import Connector
from extract.locate import TargetSpec
from extract.manifest import MANIFEST, Answers, Manifest, TargetInfo, Totals, read_manifest, require
from extract.plan import plan
from extract.probe import probe
from extract.prompts import (
    Chat,
    MaskedSample,
    Renderer,
    Report,
    Row,
    UnmaskableChat,
    mask_answers,
    merge_turns,
)
from extract.regenerate import Reason, decode_batch, regenerate
from extract.server import Server
from extract.states import write_states
from extract.target import Target


class Stage:
    """`rank` of `world` processes works on a share of the batches and shards; process 0 sees the result."""

    def __init__(
        self, config: Config, spec: TargetSpec, renderer: Renderer, rank: int, world: int
    ) -> None:
        self.config, self.spec, self.renderer = config, spec, renderer
        self.rank, self.world = rank, world

    def run(
        self,
        target: Target,
        chats: Sequence[Chat],
        report: Report,
        folder: Path,
        *,
        held_out: bool = False,
        server: Server | None = None,
        connector: Connector | None = None,
    ) -> str | None:
        """Answers, then states. What is there already and was made with the same settings is kept.

        The target itself makes both, unless a server is there for the answers or a connector for the states.
        Returns a sentence about samples that had to be left out, if there are any (process 0).
        UserError when the folder holds states that were made with other settings.
        """
        name = folder.name if held_out else "training"
        states = folder / "states"
        identity = self._identity(target, held_out, server)
        self._require_same(states, identity)

        started = time.monotonic()
        rows = self._rows(target, chats, report, folder, identity, held_out, server)
        samples = self._usable(rows, report, merge=not held_out)
        self._say(
            name,
            f"{len(samples)} samples, {sum(len(s.input_ids) for s in samples):,} tokens, "
            f"{sum(sum(s.loss_mask) for s in samples):,} supervised ({time.monotonic() - started:.0f} s)",
        )
        for line in report.lines():
            self._say("", line)

        data = data_fingerprint(samples)
        self._require_same(states, {"data_fingerprint": data})
        plans = plan(
            [len(s.input_ids) for s in samples],
            shard_tokens=self.config.extract.shard_tokens,
            batch_tokens=self.config.extract.batch_tokens,
        )
        manifest = Manifest(
            schema=1,
            complete=False,
            data_fingerprint=data,
            plan_fingerprint=fingerprint(
                [data, [p.batches for p in plans], {k: str(v) for k, v in identity.items()}]
            ),
            target_head=None,
            shards=(),
            totals=Totals.of(()),
            **identity,
        )
        if connector is None:
            probe(target, self.spec.target_layer_ids, samples[0].input_ids)
        elif self.rank == 0:
            connector.probe(samples[0])
        started = time.monotonic()
        complete = write_states(
            states,
            target,
            samples,
            plans,
            manifest,
            make=partial(connector.shard, samples=samples, last_hidden=manifest.last_hidden)
            if connector
            else None,
            rank=self.rank,
            world=self.world,
            window_gb=None if held_out else self.config.extract.window_gb,
            progress=self._bar(f"states {name}"),
        )
        if complete is None:
            return None
        rate = complete.totals.tokens / max(time.monotonic() - started, 1e-9)
        self._say(
            "states",
            f"{states}: {len(complete.shards)} shards, {complete.totals.bytes / 1e6:,.0f} MB ({rate:,.0f} tokens/s)",
        )
        return left_out(states, complete)

    def _identity(self, target: Target, held_out: bool, server: Server | None) -> dict[str, Any]:
        """What the manifest says of how the states are made; known before the first answer."""
        config, spec = self.config, self.spec
        if config.data.regenerate or held_out:
            temperature = 0.0 if held_out else config.data.temperature
            answers = Answers(
                source="server" if server else "regenerated",
                greedy=temperature == 0,
                max_new_tokens=config.eval.max_new_tokens
                if held_out
                else config.data.max_new_tokens,
                temperature=temperature,
            )
        else:
            answers = Answers(source="given", greedy=False, max_new_tokens=None, temperature=None)
        return {
            "target": TargetInfo(
                id=spec.label, revision=config.target.revision, fingerprint=target.fingerprint()
            ),
            "tokenizer_hash": tokenizer_hash(self.renderer.tokenizer),
            "template_hash": self.renderer.template_hash,
            "enable_thinking": config.target.enable_thinking,
            "target_layer_ids": spec.target_layer_ids,
            "hidden_size": spec.hidden_size,
            "num_target_layers": spec.num_layers,
            "vocab_size": spec.vocab_size,
            "storage_dtype": config.eval.dtype if held_out else config.extract.storage_dtype,
            "target_dtype": str(target.dtype).removeprefix("torch."),
            "mask_token_id": spec.mask_token_id,
            "answers": answers,
            "last_hidden": config.extract.store_last_hidden and not held_out,
        }

    @staticmethod
    def _require_same(states: Path, identity: dict[str, Any]) -> None:
        if (states / "manifest.json").exists():
            require(read_manifest(states, incomplete_ok=True), states, **identity)

    def _rows(
        self,
        target: Target,
        chats: Sequence[Chat],
        report: Report,
        folder: Path,
        identity: dict[str, Any],
        held_out: bool,
        server: Server | None,
    ) -> list[Row]:
        """The target's own answers, or with data.regenerate=false the ones in the files."""
        config, answers = self.config, identity["answers"]
        if answers.source == "given":
            rows = []
            for chat in chats:
                try:
                    rows += mask_answers(self.renderer, chat, set(target.stop_ids))
                except UnmaskableChat as error:
                    report.add(error.reason, chat.id)
            return rows

        def decode(prompts: Sequence[list[int]], seed: int) -> list[tuple[list[int], Reason]]:
            return decode_batch(
                target,
                prompts,
                answers.max_new_tokens,
                sampler=Sampler(answers.temperature),
                generators=[
                    torch.Generator(target.device).manual_seed(seed + i)
                    for i in range(len(prompts))
                ],
            )

        rows, dropped = regenerate(
            chats,
            self.renderer,
            server.answer if server else decode,
            folder / "conversations",
            settings={
                **{
                    k: str(identity[k])
                    for k in ("target", "target_dtype", "template_hash", "answers")
                },
                "server": server.name if server else None,
            },
            seed=config.seed,
            batch_size=config.eval.batch_size if held_out else config.data.batch_size,
            max_prompt_tokens=config.data.max_prompt_tokens,
            rank=self.rank,
            world=self.world,
            progress=self._bar(f"answers {folder.name}"),
        )
        for reason, row_id in dropped:
            report.add(reason, row_id)
        return rows

    def _usable(self, rows: Sequence[Row], report: Report, *, merge: bool) -> list[MaskedSample]:
        """Samples that a drafter can learn from. UserError when there is none or one holds the mask token."""
        kept = []
        for row in rows:
            if (
                self.spec.mask_token_id in row.prompt_ids
                or self.spec.mask_token_id in row.answer_ids
            ):
                raise UserError(
                    f"the mask token {self.spec.mask_token_id} stands in chat {row.id}; the drafter could not tell it "
                    "from an unknown slot; set drafter.mask_token_id to a token that no text contains"
                )
            if len(row.answer_ids) < 2:  # nothing to draft after its first token
                report.add("answer shorter than 2 tokens", row.id)
            else:
                kept.append(row)
        if not kept:
            raise UserError(
                "no chat is left to extract: "
                + "; ".join(report.lines())
                + "; check data.prompts and the limits"
            )
        if merge:
            return merge_turns(kept)
        return [MaskedSample(r.id, r.input_ids, r.loss_mask) for r in kept]

    def _say(self, what: str, text: str) -> None:
        if self.rank == 0:
            say(what, text)

    def _bar(self, what: str) -> Callable[[int, int], None] | None:
        if self.rank != 0 or not sys.stderr.isatty():
            return None

        def show(done: int, total: int) -> None:
            end = "\n" if done >= total else ""
            print(f"\r{what}: {done:,}/{total:,}", end=end, file=sys.stderr, flush=True)

        return show


def say(what: str, text: str) -> None:
    print(f"{what + ':' if what else '':<10}{text}", flush=True)


def left_out(folder: Path, manifest: Manifest) -> str | None:
    """Name the samples that are missing from a complete states folder, and why; None when it has all of them."""
    if not (missing := manifest.quarantined):
        return None
    named = ", ".join(f"{sample.id!r} ({sample.reason})" for sample in missing[:3])
    more = f" and {len(missing) - 3} more, see {MANIFEST}" if len(missing) > 3 else ""
    planned = manifest.totals.samples + len(missing)
    return f"{len(missing)} of {planned} samples are left out of {folder}: {named}{more}"


def data_fingerprint(samples: Sequence[MaskedSample]) -> str:
    """Of ids, tokens and masks. One sample at a time: as one text a large data set would fill the memory."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(repr((sample.id, len(sample.input_ids))).encode())
        digest.update(sample.input_ids.tobytes() + sample.loss_mask.tobytes())
    return digest.hexdigest()[:16]


def tokenizer_hash(tokenizer: Any) -> str:
    """Of the vocabulary: every token with its id."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:16]
