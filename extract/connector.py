"""Hidden states from a running vLLM, for targets that one process cannot hold (extract.backend: vllm).

    python extract/main.py --config C --vllm-command          # prints the command that starts the server
    python extract/main.py --config C --server http://HOST:PORT

vLLM's speculative method `extract_hidden_states` drafts nothing: it keeps hidden states beside the KV cache, and a
connector writes them to a file for each request. Every planned sample is sent as a prompt, whole, and its file becomes
a `Sample`, so that shards, resume and manifest are those of our own forward. See docs/backends.md.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from configs.load import UserError
from configs.schema import Config
from extract.locate import Location, TargetSpec
from extract.plan import ShardPlan
from extract.prompts import MaskedSample
from extract.sample import Format, Sample, defect_of
from extract.server import Client
from extract.skeleton import Skeleton
from extract.vllm_files import FOLDER, LostFileError, discard, named_file, read_states

PROBE_TOKENS = 64
START = "start vLLM with the command that --vllm-command prints"


def layer_ids(spec: TargetSpec, last_hidden: bool) -> list[int]:
    """The layers to ask vLLM for, in its own numbers: k is what block k reads, so our tap i is k = i + 1.

    0, the embedding, comes first: it proves which token a row belongs to. k = N is the last block's output, not normed.
    """
    deepest = {spec.num_layers} if last_hidden else set()
    return sorted({0, *(tap + 1 for tap in spec.target_layer_ids)} | deepest)


def serve_command(config: Config, location: Location, spec: TargetSpec, longest: int | None) -> str:
    """How to start the server for this config. How many GPUs it takes is for the user to add.

    `longest` is how many positions the target has, where its config says so: vLLM refuses more.
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {
                "eagle_aux_hidden_state_layer_ids": layer_ids(
                    spec, config.extract.store_last_hidden
                )
            }
        },
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str((Path(config.run_dir) / FOLDER).resolve())
        },
    }
    command = ["vllm", "serve", location.source, "--dtype", config.target.dtype]
    if location.revision is not None:
        command += ["--revision", location.revision]
    if config.target.trust_remote_code:
        command += ["--trust-remote-code"]
    if config.data.regenerate:  # answers from files have any length
        answer = max(config.data.max_new_tokens, config.eval.max_new_tokens)
        needed = config.data.max_prompt_tokens + answer + 8
        command += ["--max-model-len", str(min(needed, longest or needed))]
    command += ["--no-enable-prefix-caching", "--speculative-config", json.dumps(speculative)]
    return shlex.join([*command, "--kv-transfer-config", json.dumps(transfer)])


class Connector:
    """Makes the samples of a shard, as `forward_shard` does, from the files of a server."""

    def __init__(self, url: str, target: Skeleton, spec: TargetSpec, config: Config) -> None:
        self.client, self.target, self.spec = Client(url), target, spec
        self.folder = Path(config.run_dir) / FOLDER
        self.model = str(self.client.model()["id"])
        self.layers = layer_ids(spec, config.extract.store_last_hidden)
        if spec.num_layers in self.layers and target.norm is None:
            raise UserError(
                f"{spec.label} has no final norm by transformers' usual name, so that states of its last block "
                "cannot be told from normed ones; leave out tap "
                f"{spec.num_layers - 1} and extract.store_last_hidden, or use extract.backend=hf"
            )

    def probe(self, sample: MaskedSample) -> None:
        """Prove on one sample that the first tap is what design.md 2 says. UserError when not.

        The blocks up to it are read and run here: a layer numbered differently would be off by a block everywhere.
        """
        tap, made = self.spec.target_layer_ids[0], self.sample(sample, last_hidden=False)
        if defect := defect_of(made, self._form(last_hidden=False)):
            raise UserError(
                f"vLLM's states of the first sample, {sample.id!r}, cannot prove that the server is right: {defect}; "
                "restart vLLM"
            )
        theirs = made.hidden_states[:PROBE_TOKENS, : self.spec.hidden_size].float()
        ids = made.input_ids[:PROBE_TOKENS].long()
        ours = self.target.first_blocks(ids[None], tap)[0].float()
        distance = float(((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).median())
        limit = 1e-3 if self.target.dtype == torch.float32 else 0.1
        if not distance <= limit:
            raise UserError(
                f"tap {tap} of {self.spec.label} from the server at {self.client.url} differs from a plain forward by "
                f"{distance:.1e} (limit {limit:.0e}); {START}"
            )

    def shard(
        self, plan: ShardPlan, samples: Sequence[MaskedSample], last_hidden: bool
    ) -> list[Sample]:
        """The samples of a shard with their states, in plan order; about a batch of them is under way at a time."""
        order = [i for batch in plan.batches for i in batch]
        with ThreadPoolExecutor(max_workers=max(map(len, plan.batches))) as pool:
            made = pool.map(lambda i: self.sample(samples[i], last_hidden), order)
            by_number = dict(zip(order, made, strict=True))
        return [by_number[i] for i in plan.samples]

    def sample(self, sample: MaskedSample, last_hidden: bool) -> Sample:
        """One sample with its states; its file is gone afterwards.

        UserError when the file says that the server is not the one that was asked for. What is wrong with this sample
        alone, too few rows, NaN, Inf or zeros, is left to `write_shard`, which leaves it out by name.
        """
        what = f"sample {sample.id!r}"
        try:
            file, states = self._ask(sample, what)
        except LostFileError:  # when the second is lost too, it is the server's disk or folder
            file, states = self._ask(sample, what)
        taps = [self.layers.index(tap + 1) for tap in self.spec.target_layer_ids]
        with torch.no_grad():
            last = self.target.norm(states[:, -1]) if last_hidden else None
        made = Sample(
            id=sample.id,
            input_ids=torch.frombuffer(sample.input_ids, dtype=torch.int32),
            loss_mask=torch.frombuffer(sample.loss_mask, dtype=torch.uint8),
            hidden_states=states[:, taps].flatten(1),  # a copy: the file is mapped and about to go
            last_hidden=last,
        )
        if not defect_of(made, self._form(last_hidden)):
            self._refuse(self.fault_of_rows(made.input_ids, states), file, what)
        discard(file, what)
        return made

    def _form(self, last_hidden: bool) -> Format:
        taps = len(self.spec.target_layer_ids)
        return Format(taps, self.spec.hidden_size, self.target.dtype, last_hidden)

    def _ask(self, sample: MaskedSample, what: str) -> tuple[Path, Tensor]:
        """The file and its states [T, layers, H], where T and the values may be wrong."""
        prompt = sample.input_ids.tolist()
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        file = named_file(self.client.complete(body), self.folder)
        if file is None:
            raise UserError(
                f"the server at {self.client.url} answered {what} and stored no hidden states; {START} and run the "
                "same command again"
            )
        token_ids, states = read_states(file, what)
        self._refuse(self.fault(prompt, token_ids, states), file, what)
        return file, states

    @staticmethod
    def _refuse(fault: str | None, file: Path, what: str) -> None:
        if fault:
            raise UserError(f"vLLM's states of {what} ({file}): {fault}")

    def fault(self, input_ids: Sequence[int], token_ids: Tensor, states: Tensor) -> str | None:
        """What shows that the server runs with other settings, or mixes up requests."""
        found = token_ids.tolist()
        for at, (theirs, ours) in enumerate(zip(found, input_ids, strict=False)):
            if theirs != ours:
                return (
                    f"it has {len(found)} tokens and the sample {len(input_ids)}; token {at} is {theirs}, not {ours}; "
                    f"{START}"
                )
        shape = [*states.shape[:1], len(self.layers), self.spec.hidden_size]
        if list(states.shape) != shape:
            return (
                f"its shape is {list(states.shape)} and layers {self.layers} need {shape}; {START}"
            )
        if states.dtype != self.target.dtype:
            return f"it is {states.dtype} and the config says {self.target.dtype}; {START}"
        return None

    def fault_of_rows(self, input_ids: Tensor, states: Tensor) -> str | None:
        """What shows that rows [T, layers, H], a finite one for each token, are not of these tokens or layers."""
        with torch.no_grad():
            embedded = self.target.embed(input_ids).float()
        cosine = torch.cosine_similarity(states[:, 0].float(), embedded, dim=-1)
        wrong = ((embedded.norm(dim=-1) > 0) & ~(cosine > 0.98)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            return (
                f"row {at} does not start from the embedding of its token {int(input_ids[at])}, so that {len(wrong)} of "
                f"{len(input_ids)} rows are of something else; {START}, and for this target"
            )
        if self.layers[-1] == self.spec.num_layers and self._normed(states[:, -1].float()):
            return (
                f"layer {self.spec.num_layers}, the output of the last block, comes after the final norm; leave out tap "
                f"{self.spec.num_layers - 1} and extract.store_last_hidden, or use extract.backend=hf"
            )
        return None

    def _normed(self, states: Tensor) -> bool:
        """Whether each row [T, H] has the length that the final norm gives."""
        with torch.no_grad():
            ones = torch.ones(1, states.shape[-1], dtype=self.target.dtype)
            scale = self.target.norm(ones)[0].float()  # ones are of length one already
        used = scale.abs() > 1e-3
        length = (states[:, used] / scale[used]).square().mean(-1).sqrt()
        return bool(((length - 1).abs() < 0.02).all())
