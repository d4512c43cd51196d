"""Faults that bit others in evaluation (docs/field-bugs.md) and that no other test here would show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eval.decode
from configs.load import UserError, load_config
from configs.schema import TargetConfig
from eval.compare import compare
from eval.decode import Propose, decode, propose_chain, propose_tree
from eval.live import live_sets
from eval.loading import load_checked
from eval.results import invalid_rows
from eval.selftest import leaf_paths, plain_logits, random_tree
from eval.tree import Tree, chain_tree
from eval.verify import Verifier
from extract.head import head_of
from extract.manifest import write_manifest
from extract.regenerate import decode_batch
from extract.shards import ShardReader, plan
from extract.target import Target, load_target
from tests.conftest import write_config
from tests.test_eval_compare import results, row, uneven
from tests.test_extract_shards import make_samples, manifest_of, store
from train.drafter import FULL, DFlashDrafter, DraftShape, drafter_config
from train.export import write
from train.layout import save_drafter

TAPS = (0, 2, 5)  # the last of six blocks among them
PROMPT = list(range(40, 60))


def load(folder: Path) -> Target:
    return load_target(TargetConfig(path=str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load(tiny_target)


def make_drafter(target: Target) -> DFlashDrafter:
    drafter = DFlashDrafter(
        drafter_config(target.config, num_hidden_layers=1, layer_types=[FULL]),
        DraftShape(block_size=4, mask_token_id=300, target_layer_ids=TAPS, num_target_layers=6),
    )
    drafter.reset_parameters(0)
    return drafter.eval().requires_grad_(False)


def test_the_drafter_is_fed_the_states_of_the_committed_text_and_of_nothing_else(
    target: Target,
) -> None:
    """A3, F9: after every round what it was fed is what extraction stores of that text, in the last block too."""
    generator, words = torch.Generator().manual_seed(0), torch.arange(5, 290)
    verifier, kept = Verifier(target, TAPS), list(PROMPT)
    _, features = verifier.prefill(PROMPT)
    fed: list[Tensor] = [features]
    for _ in range(6):
        tree = random_tree(generator, 9, 5, words)
        _, features = verifier.verify(tree)
        paths = leaf_paths(tree)
        path = paths[int(torch.randint(len(paths), (), generator=generator))][:3]
        verifier.commit(path)
        fed.append(features[path])
        kept += tree.tokens[path].tolist()
        stored, _ = target.forward_taps(torch.tensor([kept]), TAPS)
        torch.testing.assert_close(torch.cat(fed), stored[0], rtol=1e-4, atol=1e-5)


def test_the_targets_own_sampling_settings_do_not_reach_greedy_answers(tiny_target: Path) -> None:
    """F9: a generation_config.json with penalties changes what `generate` says, and nothing here."""
    target, prompt = load(tiny_target), list(range(40, 60))
    clean = decode_batch(target, [prompt], 24)
    settings = target.model.generation_config
    settings.repetition_penalty, settings.temperature, settings.do_sample = 1.9, 0.6, True
    assert decode_batch(target, [prompt], 24) == clean
    ((answer, _),) = clean
    (logits,) = plain_logits(target, [prompt + answer], [len(answer) + 1])
    assert logits.argmax(-1)[:-1].tolist() == answer
    inputs = torch.tensor([prompt])
    settings.do_sample = False
    theirs = target.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=24
    )
    assert theirs[0, len(prompt) :].tolist() != answer, "the penalty changes nothing: no test"


def test_exact_ties_are_settled_alike_by_every_decoder(tiny_target: Path) -> None:
    """F11: every row of the head stands in it twice, so each choice is a tie, and the lower id is said."""
    target = load(tiny_target)
    weight = target.head.weight.data
    weight[2] = 0  # no answer ends
    weight[160:] = weight[:160]
    drafter, head = make_drafter(target), head_of(target)
    ((plain, _),) = decode_batch(target, [PROMPT], 24)
    assert max(plain) < 160 and len(plain) == 24 and len(set(plain)) >= 3

    def oracle() -> Propose:
        at = 0

        def propose(logits: Tensor, root: int) -> Tree:
            nonlocal at
            assert root == plain[at]
            drafts = torch.tensor(plain[at + 1 : at + 4])
            at += 4
            return chain_tree(drafts, root)

        return propose

    for propose in (propose_chain, propose_tree(8), propose_tree(64)):
        assert decode(target, drafter, head, PROMPT, propose, max_new_tokens=24).tokens == plain
    got = decode(target, drafter, head, PROMPT, oracle(), max_new_tokens=24)
    assert got.tokens == plain and got.committed == [4] * 5 + [3]


def test_a_walk_that_accepts_blindly_is_invalid(
    target: Target, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F21: its acceptance is the highest there is, and the text is not the target's."""
    config = load_config(write_config(tmp_path / "c.yaml", tiny_target, eval={"budgets": [8]}))
    lengths = [30, 24, 26]
    plans = plan(lengths, shard_tokens=60, batch_tokens=60)
    reader = ShardReader(store(tmp_path / "states", make_samples(lengths), plans))
    drafter = make_drafter(target)

    def measured() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows, check = live_sets(config, target, drafter, head_of(target), {"chat": reader}, {})
        assert check is not None
        return rows, check

    rows, check = measured()
    assert check["answers_that_differ"] == 0 and check["compared_tokens"] > 20
    assert invalid_rows({"rows": rows}) == []

    def blind(tree: Tree, logits: Tensor, *_: Any) -> tuple[list[int], list[int]]:
        path = max(leaf_paths(tree), key=len)
        return path, [*tree.tokens[path[1:]].tolist(), int(logits[path[-1]].argmax())]

    monkeypatch.setattr(eval.decode, "walk", blind)
    rows, check = measured()
    chain = next(r for r in rows if r["decoder"] == "dflash")
    assert chain["tau_without_bonus"] > 2.5
    assert check["answers_that_differ"] > 0 and check["largest_margin"] > 0.005
    assert invalid_rows({"rows": rows}) == ["chat, DFlash chain", "chat, DDTree 8"]


MANIFEST: dict[str, Any] = {
    "target_layer_ids": TAPS, "hidden_size": 64, "num_target_layers": 6, "vocab_size": 320, "mask_token_id": 300,
}  # fmt: skip


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"num_target_layers": 8}, "num_target_layers=8, the config says 6"),
        ({"target_layer_ids": (0, 2, 4)}, r"target_layer_ids=\[0, 2, 4\], the config says \[0, 2, 5\]"),
        ({"mask_token_id": 301}, "mask_token_id=301, the config says 300"),
        ({"hidden_size": 128}, "hidden_size=128, the config says 64"),
        ({"vocab_size": 640}, "vocab_size=640, the config says 320"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_drafter_of_another_target_is_refused_before_its_weights_are_read(
    target: Target, tmp_path: Path, made: dict[str, Any], message: str
) -> None:
    """A5, B13: depth, layers, mask token, width and vocabulary, both values named."""
    drafter, cpu = make_drafter(target), torch.device("cpu")
    save_drafter(drafter, drafter.state_dict(), tmp_path, torch.float32)
    states = tmp_path / "states"
    states.mkdir()
    write_manifest(states, manifest_of((), **MANIFEST))
    load_checked(tmp_path, {"chat": ShardReader(states)}, cpu, torch.float32)
    (tmp_path / "model.safetensors").unlink()
    write_manifest(states, manifest_of((), **(MANIFEST | made)))
    with pytest.raises(UserError, match=message):
        load_checked(tmp_path, {"chat": ShardReader(states)}, cpu, torch.float32)


def test_a_drafter_of_other_weights_of_the_same_shape_is_refused_with_both_names(
    target: Target, tmp_path: Path
) -> None:
    """A5: its tau would be a number like any other. A drafter that does not say what it is of is let through."""
    drafter, cpu = make_drafter(target), torch.device("cpu")
    manifest = manifest_of((), **MANIFEST)
    base = {"id": "base-7b", "revision": None, "fingerprint": "0123456789abcdef"}
    own = manifest.target.model_dump()
    (states := tmp_path / "states").mkdir()
    write_manifest(states, manifest)
    sets = {"chat": ShardReader(states)}

    def checkpoint(name: str, origin: Any) -> Path:
        (folder := tmp_path / name).mkdir()
        drafter.origin = origin
        save_drafter(drafter, drafter.state_dict(), folder, torch.float32)
        return folder

    for name, origin in {"own": {"target": own}, "foreign": {}, "odd": ["?"]}.items():
        load_checked(checkpoint(name, origin), sets, cpu, torch.float32)
    other = checkpoint("other", {"target": base})
    (other / "model.safetensors").unlink()
    message = rf"for base-7b \(weights 0123.*\) and .* are of {own['id']} \(weights {own['fingerprint']}\); .*init_from="
    with pytest.raises(UserError, match=message):
        load_checked(other, sets, cpu, torch.float32)
    write(checkpoint("whole", {"target": base}), "zlab", tmp_path / "exported")
    with pytest.raises(UserError, match=message):
        load_checked(tmp_path / "exported", sets, cpu, torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_drafter_with_nan_is_refused_by_name(
    target: Target, tmp_path: Path, value: float
) -> None:
    """F22: its chain would be token 0 again and again, and tau an honest-looking 1."""
    drafter: Any = make_drafter(target)
    drafter.layers[0].self_attn.o_proj.weight[3, 5] = value
    save_drafter(drafter, drafter.state_dict(), tmp_path, torch.float32)
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.o_proj\.weight of .* NaN or Inf"):
        load_checked(tmp_path, {}, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_thinking": True}, "target enable thinking of A is unset and that of B is True"),
        ({"template_hash": "beef"}, "target template hash of A is unset and that of B is beef"),
    ],
)
def test_other_prompts_make_no_comparison(changes: dict[str, Any], said: str) -> None:
    """B16: thinking mode and chat template are part of what was measured."""
    a = results(row(uneven()))
    with pytest.raises(UserError, match=said):
        compare(a, a | {"target": a["target"] | changes})
