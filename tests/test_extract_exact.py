"""Stored states against a batch of one, in every family of target, and what the start-up probe has to catch.

The oracle is the model's own forward on one sequence with plain hooks on its blocks; nothing of extract/ is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

import extract.target
from configs.load import UserError
from extract.probe import probe
from extract.prompts import MaskedSample
from extract.shards import ShardReader, plan
from extract.states import write_states
from extract.target import Target
from tests.conftest import make_target, tiny_tokenizer
from tests.test_eval_verify import FAMILIES, GDN, load
from tests.test_extract_shards import manifest_of

CASES = [*FAMILIES, "tied", "tied_gemma3", "conditional"]
TAPS = (0, 2, 5)  # the deepest of six layers among them
# Longer than a sliding window (10 and 12), than a chunk of the delta rule (64), and as short as a sample can be.
LENGTHS = [2, 70, 5, 75, 33, 12, 13]
# How far the worst token's vector may be off, as a share of its length. A recurrent layer carries rounding along. In
# bfloat16 (0.4 % in every rounding) typical tokens are 1 % off after six random layers and the worst 5 %.
FLOAT32, FLOAT32_HYBRID, BFLOAT16 = 1e-5, 5e-5, 1e-1
HYBRID = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "conditional"}


def conditional() -> Any:
    """Qwen3.5 as it is released: a vision-language class, the text layers one level down."""
    from transformers import Qwen3_5ForConditionalGeneration

    text = AutoConfig.for_model(
        "qwen3_5_text", hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=320, initializer_range=0.08, **GDN,
    )  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    vision["out_hidden_size"] = 64
    config: Any = AutoConfig.for_model("qwen3_5", text_config=text.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    return Qwen3_5ForConditionalGeneration(config).float()


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Target]:
    made: dict[tuple[str, torch.dtype], Target] = {}

    def get(case: str, dtype: torch.dtype = torch.float32) -> Target:
        if (case, dtype) not in made:
            if case == "conditional":
                made[case, dtype] = Target(conditional().to(dtype), tiny_tokenizer(), case)
            else:
                family = case.removeprefix("tied_") if case != "tied" else "qwen3"
                tied = case.startswith("tied")
                folder = tmp_path_factory.mktemp(case)
                make_target(folder, **FAMILIES[family], tie_word_embeddings=tied)
                made[case, dtype] = load(folder, family, dtype)
        return made[case, dtype]

    return get


def make_samples(lengths: Sequence[int], seed: int = 0) -> list[MaskedSample]:
    g = torch.Generator().manual_seed(seed)
    return [
        MaskedSample.of(
            f"s{i}", torch.randint(4, 290, (n,), generator=g).tolist(), [0] + [1] * (n - 1)
        )
        for i, n in enumerate(lengths)
    ]


@torch.no_grad()
def alone(target: Target, ids: Sequence[int]) -> tuple[list[Tensor], Any]:
    """(the output of every block [T, hidden], transformers' own output) of one sequence."""
    seen: dict[int, Tensor] = {}

    def keep(i: int) -> Any:
        return lambda module, args, out: seen.__setitem__(
            i, out if torch.is_tensor(out) else out[0]
        )

    handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(target.layers)]
    try:
        out = target.model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    return [seen[i][0] for i in range(len(seen))], out


def off(ours: Tensor, theirs: Tensor) -> float:
    """The largest distance of a row from its counterpart, as a share of its length."""
    ours, theirs = ours.double(), theirs.double()
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


def store(folder: Path, target: Target, batch_tokens: int) -> ShardReader:
    samples = make_samples(LENGTHS)
    plans = plan(LENGTHS, shard_tokens=170, batch_tokens=batch_tokens)
    assert len(plans) > 1 and (batch_tokens == 1 or any(len(p.batches[0]) > 1 for p in plans))
    name: Any = str(target.dtype).removeprefix("torch.")
    manifest = manifest_of(
        (), complete=False, target_layer_ids=TAPS, hidden_size=64, storage_dtype=name, target_dtype=name,
        num_target_layers=6, vocab_size=320, last_hidden=True,
    )  # fmt: skip
    write_states(folder, target, samples, plans, manifest)
    return ShardReader(folder, verify_checksums=True)


def check(reader: ShardReader, target: Target, limit: float) -> float:
    """Every stored row is the row that the oracle has for the same token of the same sample."""
    samples = make_samples(LENGTHS)
    assert reader.ids == [s.id for s in samples]
    worst = 0.0
    references, found = [], []
    for i, sample in enumerate(samples):
        stored = reader[i]
        assert stored.input_ids.tolist() == list(sample.input_ids)
        assert stored.loss_mask.tolist() == list(sample.loss_mask)
        blocks, out = alone(target, sample.input_ids)
        assert stored.last_hidden is not None
        for tap, states in zip(TAPS, stored.hidden_states.split(64, dim=-1), strict=True):
            worst = max(worst, off(states, blocks[tap]))
            if (
                tap < 5
            ):  # transformers' own list says the same, but for its last entry, which is post-norm
                assert torch.equal(blocks[tap], out.hidden_states[tap + 1][0])
        worst = max(worst, off(target.logits(stored.last_hidden), out.logits[0]))
        references.append(torch.stack([blocks[tap] for tap in TAPS], dim=1))
        found.append(stored.hidden_states.unflatten(-1, (3, 64)))
    assert worst <= limit, worst
    # Among all tokens, samples and taps, a stored vector lies nearest to its own.
    theirs, ours = (torch.cat(x).flatten(0, 1).float() for x in (references, found))
    distances = torch.cdist(ours, theirs, compute_mode="donot_use_mm_for_euclid_dist")
    assert torch.equal(distances.argmin(1), torch.arange(len(ours)))
    return worst


@pytest.mark.parametrize("case", CASES)
def test_every_stored_row_is_that_of_a_batch_of_one(targets, tmp_path, case):
    target = targets(case)
    probe(target, TAPS, make_samples(LENGTHS)[1].input_ids)
    check(store(tmp_path, target, 160), target, FLOAT32_HYBRID if case in HYBRID else FLOAT32)


@pytest.mark.parametrize("batch_tokens", [1, 10**6])
@pytest.mark.parametrize("case", ["gemma3", "qwen3_5"])
def test_the_size_of_a_batch_changes_no_state(targets, tmp_path, case, batch_tokens):
    limit = FLOAT32_HYBRID if case in HYBRID else FLOAT32
    check(store(tmp_path, targets(case), batch_tokens), targets(case), limit)


@pytest.mark.parametrize("case", ["qwen3", "gemma3", "qwen3_5"])
def test_bfloat16_stays_within_its_rounding(targets, tmp_path, case):
    target = targets(case, torch.bfloat16)
    probe(target, TAPS, make_samples(LENGTHS)[1].input_ids)
    assert check(store(tmp_path, target, 160), target, BFLOAT16) > 1e-4


# ---- what the probe has to catch

IDS = make_samples([40])[0].input_ids
RECORD = extract.target.record_taps


def patched_taps(change: Callable[[Any, Sequence[int]], None], ask: Callable[[int], int]) -> Any:
    @contextmanager
    def record(layers, taps):
        with RECORD(layers, [ask(t) for t in taps]) as recorded:
            yield recorded
        recorded.states = {t: recorded.states[ask(t)] for t in taps}
        recorded.taps = tuple(taps)
        change(recorded, taps)

    return record


def tokens_shifted(recorded, taps):
    recorded.states = {i: s.roll(1, dims=1) for i, s in recorded.states.items()}


def rows_swapped(recorded, taps):
    recorded.states = {i: s.flip(0) for i, s in recorded.states.items()}


def one_tap_shifted(recorded, taps):
    recorded.states[taps[-1]] = recorded.states[taps[-1]].roll(-1, dims=1)


def nothing(recorded, taps):
    pass


FAULTS = {
    "the layer before": (nothing, lambda t: max(t - 1, 0), "tap 2"),
    "the layer after": (nothing, lambda t: min(t + 1, 5), "tap 0"),
    "the last two swapped": (nothing, lambda t: {5: 4}.get(t, t), "tap 5"),
    "the token before": (tokens_shifted, lambda t: t, "tap 0"),
    "the token after, deepest tap": (one_tap_shifted, lambda t: t, "tap 5"),
    "rows of a batch swapped": (rows_swapped, lambda t: t, "in a batch"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("massive", [False, True])
def test_the_probe_catches(targets, monkeypatch, fault, massive):
    """Also beside a massive activation (in trained models the first token's is 1000 times the rest), and in bfloat16."""
    change, ask, where = FAULTS[fault]
    target = targets("qwen3", torch.bfloat16 if massive else torch.float32)
    if massive:
        weight = target.embed.weight
        monkeypatch.setattr(weight, "data", weight.data.clone())
        weight.data[IDS[0], 7] = 3000.0
    probe(target, TAPS, IDS)
    monkeypatch.setattr(extract.target, "record_taps", patched_taps(change, ask))
    with pytest.raises(UserError, match=rf"states of .*{where}.* differ from a "):
        probe(target, TAPS, IDS)


def test_the_probe_catches_a_normed_deepest_tap_and_a_foreign_last_state(targets, monkeypatch):
    target = targets("qwen3")

    def normed(recorded, taps):
        recorded.states[5] = target.decoder.norm(recorded.states[5])

    monkeypatch.setattr(extract.target, "record_taps", patched_taps(normed, lambda t: t))
    with pytest.raises(UserError, match=r"states of tap 5 of qwen3 differ from a plain forward"):
        probe(target, TAPS, IDS)
    monkeypatch.undo()
    monkeypatch.setattr(Target, "logits", lambda self, last: self.head(last.roll(1, dims=1)))
    with pytest.raises(UserError, match=r"logits of qwen3 from its last hidden state differ"):
        probe(target, TAPS, IDS)


def test_the_probe_catches_a_nan(targets, monkeypatch):
    target = targets("tied")
    weight = target.layers[3].mlp.down_proj.weight
    monkeypatch.setattr(weight, "data", weight.data.clone().fill_(float("nan")))
    with pytest.raises(UserError, match=r"tap 5 of qwen3 differ from a plain forward by nan"):
        probe(target, TAPS, IDS)
