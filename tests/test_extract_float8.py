"""States stored as float8 with a scale per token and tap: how far off, how large, and what damage does."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.load import UserError, load_config
from configs.provenance import file_sha256
from extract.manifest import read_manifest, write_manifest
from extract.sample import FLOAT8, FLOAT8_VALUES, Format
from extract.shards import Sample, ShardReader, estimate_bytes, verify, write_shard
from tests.conftest import write_config
from tests.test_extract_shards import HIDDEN, LENGTHS, PLAN, PLANS, TAPS, make_samples, manifest_of
from train.batches import Schedule, StepDataset
from train.startup import check_states

torch.set_num_threads(1)

TINY = torch.finfo(torch.float32).tiny
SAMPLES = make_samples(LENGTHS, last=True)  # shards of 3, 7 and 5 tokens: odd numbers of bytes
FORMAT = Format(TAPS, HIDDEN, FLOAT8, True)


def of_states(states: Tensor) -> Sample:
    tokens = len(states)
    ids = torch.zeros(tokens, dtype=torch.int32)
    return Sample("a", ids, torch.ones(tokens, dtype=torch.uint8), states, None)


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """A complete float8 folder with last_hidden."""
    entries = []
    for shard in PLANS:
        mine = [SAMPLES[i] for i in shard.samples]
        options: dict[str, Any] = {"num_taps": TAPS, "storage_dtype": FLOAT8}
        entries.append(write_shard(tmp_path, shard, mine, **options, plan_fingerprint=PLAN))
    manifest = manifest_of(entries, storage_dtype="float8_e4m3fn", last_hidden=True)
    write_manifest(tmp_path, manifest)
    return tmp_path


# ---- how far off

finite_bf16 = st.one_of(st.integers(0, 0x7F7F), st.integers(0x8000, 0xFF7F))


def check_bound(states: Tensor) -> None:
    """Half a step of e4m3 and of bfloat16, relative to the value or, near zero, to the token and tap's largest."""
    form = Format(2, 4, FLOAT8, False)
    tensors = form.encode(of_states(states))
    exact, scales = states.double().view(-1, 2, 4), tensors["scales"].double()
    found = form.decode("a", tensors).hidden_states
    assert found.dtype == torch.bfloat16
    assert (scales >= TINY).all() and scales.isfinite().all()
    assert tensors["hidden_states"].float().isfinite().all()
    amax = exact.abs().amax(-1, keepdim=True)
    error = (found.double().view(-1, 2, 4) - exact).abs()
    near_zero = 2.0**-10 * torch.maximum(amax / 448, torch.tensor(TINY, dtype=torch.float64))
    bound = torch.maximum(2.0**-4 * exact.abs(), near_zero * 1.001) + 2.0**-8 * exact.abs()
    assert (error <= bound + 2.0**-134).all()  # half of the smallest bfloat16
    at_largest = (exact.abs() == amax) & (amax > 448 * TINY)
    if states.dtype == torch.bfloat16:  # the outlier channels come back bit for bit
        assert (error[at_largest] == 0).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(finite_bf16, min_size=8, max_size=8))
def test_any_bits_come_back_within_half_a_step(bits: list[int]) -> None:
    pattern = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    check_bound(pattern[None])
    # All within a few octaves, as in one token: most patterns above flush each other to zero.
    near = torch.ldexp(pattern.float().frexp()[0], torch.tensor([b % 19 for b in bits]))
    check_bound(near[None])
    check_bound(near[None].bfloat16())


@pytest.mark.parametrize("largest", [3.3895e38, 448 * TINY, 1.2e-38, 9.2e-41])
def test_extremes_give_no_nan_and_lose_no_token(largest: float) -> None:
    row = torch.tensor([1, -0.5, 1e-3, 0, -1, 0.25, 1e-9, 0.0]) * largest
    check_bound(row[None].bfloat16())
    tensors = Format(2, 4, FLOAT8, False).encode(of_states(row[None].bfloat16()))
    assert (Format(2, 4, FLOAT8, False).decode("a", tensors).hidden_states[0, [0, 4]] != 0).all()


def test_a_token_does_not_disturb_another_nor_a_tap() -> None:
    """One scale for both would flush the small one to zero."""
    states = torch.tensor([[3e4, 1e4, 2e4, 3e4, 1e-4, 2e-4, 3e-4, 4e-4], [1e-3] * 4 + [50.0] * 4])
    found = Format(2, 4, FLOAT8, False)
    again = found.decode("a", found.encode(of_states(states))).hidden_states.float()
    torch.testing.assert_close(again, states, rtol=2**-4, atol=0)


def test_the_table_is_the_cast() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    assert torch.equal(FLOAT8_VALUES.nan_to_num(999), every.float().nan_to_num(999))
    assert every.float().isnan().sum() == 2


# ---- on the disk


def test_a_folder_is_read_as_bfloat16_and_last_hidden_keeps_its_bits(states: Path) -> None:
    assert verify(states) == []
    reader = ShardReader(states, verify_checksums=True)
    assert (reader.dtype, reader.manifest.storage_dtype) == (torch.bfloat16, "float8_e4m3fn")
    for i, wanted in enumerate(SAMPLES):
        found = reader[i]
        assert torch.equal(found.input_ids, wanted.input_ids)
        assert torch.equal(found.loss_mask, wanted.loss_mask)
        assert found.last_hidden is not None and wanted.last_hidden is not None
        assert torch.equal(found.last_hidden, wanted.last_hidden)
        assert found.hidden_states.dtype == found.last_hidden.dtype == torch.bfloat16
        pair = found.hidden_states.float(), wanted.hidden_states.float()
        torch.testing.assert_close(*pair, rtol=0.07, atol=4e-5)
        assert not torch.equal(*pair)


def test_files_are_aligned_for_others_and_as_large_as_estimated(states: Path) -> None:
    for shard, entry in zip(PLANS, read_manifest(states).shards, strict=True):
        data = (states / shard.name).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__")
        sizes = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
        for name, span in header.items():
            assert span["data_offsets"][0] % sizes[span["dtype"]] == 0, name
        estimated = estimate_bytes(entry.tokens, TAPS, HIDDEN, FLOAT8, True)
        assert entry.bytes == len(data) == 8 + length + 8 * (len(shard.samples) + 1) + estimated
        tensors = load_file(states / shard.name)
        assert (tensors["hidden_states"].dtype, tensors["scales"].dtype) == (FLOAT8, torch.float32)
        by_tap = tensors["hidden_states"].float().view(-1, TAPS, HIDDEN)
        product = (by_tap * tensors["scales"][..., None]).view(-1, TAPS * HIDDEN).bfloat16()
        ours = torch.cat([ShardReader(states)[i].hidden_states for i in shard.samples])
        assert torch.equal(product, ours)
    assert estimate_bytes(1000, 5, 4096, FLOAT8, False) == 1000 * (5 * 4096 + 5 * 4 + 4 + 1)
    assert estimate_bytes(1, 5, 4096, FLOAT8, True) == 5 * 4096 + 5 * 4 + 2 * 4096 + 5


WIDE = of_states(torch.ones(3, TAPS * HIDDEN))
UNFIT = {
    "nan": (float("nan"), "NaN or Inf in token 1, tap number 0"),
    "inf": (float("-inf"), "NaN or Inf in token 1, tap number 0"),
    "zeros": (0.0, "only zeros in token 1, tap number 0"),
    "overflow": (3.4e38, "stored as float8_e4m3fn, .*NaN or Inf in token 1"),
    "underflow": (1e-44, "stored as float8_e4m3fn, .*only zeros in token 1"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_float8_cannot_hold_is_left_out_by_name(tmp_path: Path, case: str) -> None:
    value, message = UNFIT[case]
    states = WIDE.hidden_states.clone()
    states[1, :HIDDEN] = value
    sample = replace(WIDE, hidden_states=states)
    shard = replace(PLANS[0], samples=(0,))
    entry = write_shard(
        tmp_path, shard, [sample], num_taps=TAPS, storage_dtype=FLOAT8, plan_fingerprint=PLAN
    )
    (left_out,) = entry.quarantined
    assert entry.samples == 0 and left_out.id == "a"
    assert re.search(message, left_out.reason), left_out.reason


# ---- damage


def test_every_flipped_bit_of_the_scales_is_found(states: Path) -> None:
    path = states / PLANS[1].name
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    first, end = json.loads(data[8 : 8 + length])["scales"]["data_offsets"]
    assert end - first == 6 * TAPS * 4
    for byte in range(first, end):
        damaged = bytearray(data)
        damaged[8 + length + byte] ^= 1 << byte % 8
        path.write_bytes(damaged)
        assert [path.name in problem for problem in verify(states)] == [True]
        with pytest.raises(UserError, match=f"{path.name} .* is damaged: its sha256"):
            ShardReader(states, verify_checksums=True)


def forge(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Edit shard 1 and make sizes and checksums agree again, as only a faulty program would."""
    path = folder / PLANS[1].name
    with safe_open(path, "pt") as file:
        tensors, metadata = load_file(path), file.metadata()
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)
    manifest = read_manifest(folder)
    new = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    entries = [e.model_copy(update=new) if e.file == path.name else e for e in manifest.shards]
    write_manifest(
        folder, manifest_of(entries, storage_dtype=manifest.storage_dtype, last_hidden=True)
    )


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_names_its_sample(states: Path, value: float) -> None:
    forge(states, lambda t: t["scales"][4, 1].fill_(value))
    bad = SAMPLES[PLANS[1].samples[1]].id  # rows 1 to 5 of the shard
    with pytest.raises(UserError, match=f"sample '{bad}' has (a scale that is not|NaN or Inf)"):
        list(ShardReader(states).iter_shard(1))
    assert f"sample '{bad}'" in verify(states)[0]


def test_nan_and_zeros_among_the_float8_are_found(states: Path) -> None:
    forge(states, lambda t: t["hidden_states"].view(torch.uint8)[4, 3].fill_(0x7F))
    assert "has NaN or Inf" in verify(states)[0]
    forge(states, lambda t: t["hidden_states"].view(torch.uint8)[4, :HIDDEN].fill_(0))
    assert "only zeros in token 3, tap number 0" in verify(states)[0]  # of the second sample


def test_scales_and_dtype_must_be_those_of_the_manifest(states: Path) -> None:
    whole = (states / "manifest.json").read_text()
    (states / "manifest.json").write_text(whole.replace("float8_e4m3fn", "bfloat16"))
    with pytest.raises(UserError, match=r"hidden_states is \('F8_E4M3', .*needs \('BF16'"):
        ShardReader(states)
    (states / "manifest.json").write_text(whole)
    forge(states, lambda t: t.pop("scales"))
    with pytest.raises(
        UserError, match=r"scales is None and the manifest needs \('F32', \(6, 2\)\)"
    ):
        ShardReader(states)


# ---- downstream


def test_a_training_step_sees_plain_bfloat16(states: Path) -> None:
    reader = ShardReader(states)
    rows = [[4, 1], [0, 2, 3, 5, 6]]
    dataset = StepDataset(
        reader, Schedule(rows, 1, 3, 1, 1, 0), rank=0, max_length=40, last_hidden=True
    )
    (batch,) = dataset[0]
    assert batch.last_hidden is not None
    assert batch.features.dtype == batch.last_hidden.dtype == torch.bfloat16
    assert batch.features.shape == (3, 40, TAPS * HIDDEN)  # one row is empty
    row = 0 if batch.sample_ids[0] == SAMPLES[4].id else 1
    assert torch.equal(batch.features[row, :12], reader[4].hidden_states)


def test_training_refuses_states_of_another_storage(states: Path) -> None:
    changes = {"drafter": {"target_layer_ids": [1, 8]}}
    for dtype in ("bfloat16", "float8_e4m3fn"):
        extract = {"extract": {"storage_dtype": dtype}}
        config = load_config(write_config(states / "c.yaml", states, **changes, **extract))
        if dtype == "bfloat16":
            with pytest.raises(
                UserError, match='storage_dtype="float8_e4m3fn", the config says "b'
            ):
                check_states(config, ShardReader(states), states)
        else:
            check_states(config, ShardReader(states), states)
