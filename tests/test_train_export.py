"""What leaves the project: the layouts of other engines, transformers' generate, the card and the upload."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from configs.load import UserError, load_config
from eval.card import add_to_card
from eval.decode import decode, propose_chain
from extract.head import head_of
from extract.manifest import Answers, TargetInfo, Totals
from extract.target import Target, load_target
from tests.conftest import QUESTIONS, make_target, write_config
from tests.test_eval_report import make_results
from tests.test_train_drafter import small_drafter, train_style
from train import export
from train.assistant import load_assistant
from train.card import model_card
from train.drafter import FULL, SLIDING, DFlashDrafter, DraftShape, drafter_config
from train.layout import load_drafter, load_shape, save_drafter

ORIGIN = {"config_fingerprint": "c0ffee", "target": {"id": "org/target", "fingerprint": "f00d"}}


def checkpoint(folder: Path, **shape: Any) -> tuple[Path, DFlashDrafter]:
    """A finished checkpoint folder of a small drafter, stored in bfloat16."""
    model = small_drafter(**shape).float()
    model.origin = ORIGIN
    (folder / "resume").mkdir(parents=True)
    save_drafter(model, model.state_dict(), folder, torch.bfloat16)
    (folder / "README.md").write_text("# card\n")
    (folder / "resume" / "state.pt").write_text("optimizer")
    (folder / "DONE").touch()
    return folder, model


@pytest.mark.parametrize("layout", sorted(export.WRITERS))
@pytest.mark.parametrize("shape", [{}, {"sliding": True}])
def test_an_export_is_the_same_drafter(tmp_path, tiny_target, layout, shape):
    folder, model = checkpoint(tmp_path / "step-000001", **shape)
    arguments = ["--checkpoint", str(folder), "--to", layout, "--target", str(tiny_target)]
    export.main(["export", *arguments, str(tmp_path / "out")])
    got, wanted = load_drafter(tmp_path / "out"), load_drafter(folder)
    assert got.shape == model.shape and got.origin == ORIGIN
    assert got.config.layer_types == model.config.layer_types
    assert got.config.sliding_window == model.config.sliding_window
    for name, value in wanted.state_dict().items():
        assert torch.equal(got.state_dict()[name], value), name
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors", "README.md"
    }  # fmt: skip
    with pytest.raises(UserError, match="exists"):
        export.main(["export", *arguments, str(tmp_path / "out")])


def test_what_the_speculators_layout_says(tmp_path, tiny_target):
    folder, _ = checkpoint(tmp_path / "step-000001")
    export.write(folder, "speculators", tmp_path / "out", str(tiny_target))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [2, 4]  # taps 1 and 3
    assert raw["sliding_window_non_causal"] is True  # false makes vLLM's full layers causal
    assert raw["sample_from_anchor"] is False and raw["block_size"] == 4
    said = raw["speculators_config"]
    assert said["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert said["verifier"] == {
        "name_or_path": str(tiny_target),
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert raw["draft_vocab_size"] == 60 and raw["mask_token_id"] == 59
    assert raw["paceline"] == ORIGIN


def test_sglang_finds_the_rope_where_it_looked_before_transformers_5(tmp_path):
    folder, _ = checkpoint(tmp_path / "step-000001")
    export.write(folder, "sglang", tmp_path / "out")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"]
    assert raw["rope_scaling"] is None
    assert raw["dflash_config"]["block_size"] == raw["block_size"] == 4


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        ("speculators", {"sliding": True, "causal": True}, "applies sliding_window_non_causal"),
        ("speculators", {"causal_full": True}, "bidirectional"),
        ("speculators", {"input_embedding_scale": 2.0}, "input_embedding_scale"),
        ("sglang", {"input_embedding_scale": 2.0}, "input_embedding_scale"),
        ("zlab", {"sample_from_anchor": True}, "slot 0 as well"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(tmp_path, tiny_target, layout, shape, message):
    folder, _ = checkpoint(tmp_path / "step-000001", **shape)
    with pytest.raises(UserError, match=message):
        export.write(folder, layout, tmp_path / "out", str(tiny_target))
    assert not (tmp_path / "out").exists()


def test_an_export_without_a_run_asks_for_the_target(tmp_path):
    folder, _ = checkpoint(tmp_path / "step-000001")
    with pytest.raises(UserError, match="--target"):
        export.write(folder, "speculators", tmp_path / "out")


def test_push_shows_what_it_would_upload_and_leaves_the_training_state(
    tmp_path, capsys, monkeypatch
):
    folder, _ = checkpoint(tmp_path / "step-000001")
    push = ["push", "--checkpoint", str(folder), "--repo", "org/drafter"]
    export.main([*push, "--dry-run"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("config.json", "model.safetensors", "README.md"))
    assert "resume" not in shown and "DONE" not in shown
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UserError, match="HF_TOKEN"):
        export.main(push)
    (folder / "DONE").unlink()
    with pytest.raises(UserError, match="never finished"):
        export.main([*push, "--dry-run"])


# --- the card ---------------------------------------------------------------------------------------------------------


def card(tmp_path: Path, target: Path, **shape: Any) -> str:
    config = load_config(write_config(tmp_path / "config.yaml", target))
    manifest: Any = SimpleNamespace(
        target=TargetInfo(id="target", revision=None, fingerprint="f00d"),
        enable_thinking=False,
        target_layer_ids=(1, 3, 4),
        num_target_layers=6,
        tap_convention="after block i",
        mask_token_id=310,
        data_fingerprint="da7a",
        answers=Answers(source="regenerated", greedy=True, max_new_tokens=24, temperature=0.0),
    )
    return model_card(
        config,
        manifest,
        Totals(samples=8, tokens=100, supervised_tokens=80, bytes=1),
        40,
        small_drafter(**shape),
    )


def test_a_card_says_what_an_engine_and_a_person_need(tmp_path, tiny_target):
    target = make_target(tmp_path / "with-card", layers=5)
    (target / "README.md").write_text("---\nlicense: MIT\nmodel_id: org/target\n---\n# it\n")
    text = card(tmp_path, target, sliding=True, causal=True)
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["base_model"] == "org/target" and front["license"] == "mit"
    assert "dflash" in front["tags"]
    for part in (
        "[1, 3, 4] of 6",
        "| 310 |",
        "thinking mode | off",
        "f00d",
        "da7a",
        "step | 40",
        "| layers | 2; [0] see 5 positions and are causal inside the block",
    ):
        assert part in text, part
    assert '"num_speculative_tokens": 3' in text and "--speculative-num-draft-tokens 4" in text
    (tmp_path / "again.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    assert load_config(tmp_path / "again.yaml") == load_config(tmp_path / "config.yaml")
    unknown = yaml.safe_load(card(tmp_path, tiny_target).split("---\n")[1])
    assert "base_model" not in unknown and "license" not in unknown


def test_evaluations_go_into_the_card_and_replace_each_other(tmp_path, tiny_target):
    (tmp_path / "README.md").write_text(card(tmp_path, tiny_target))
    found = make_results()
    assert add_to_card(tmp_path, [found])
    once = (tmp_path / "README.md").read_text()
    drafting = [r for r in found["rows"] if r["decoder"] != "autoregressive"]
    assert "Not evaluated" not in once and once.count(f"| {found['mode']} |") == len(drafting)
    assert f"[{drafting[0]['ci95'][0]:.2f}" in once
    assert add_to_card(tmp_path, [found]) and (tmp_path / "README.md").read_text() == once
    drafting[0]["lossless"] = False
    assert add_to_card(tmp_path, [found])
    assert (tmp_path / "README.md").read_text().count(f"| {found['mode']} |") == len(drafting) - 1
    (tmp_path / "README.md").write_text("# somebody else's\n")
    assert not add_to_card(tmp_path, [found])
    assert (tmp_path / "README.md").read_text() == "# somebody else's\n"


# --- transformers' generate -------------------------------------------------------------------------------------------


def taught(target: Target, answer: list[int], prompt: list[int], **layers: Any) -> DFlashDrafter:
    """A drafter that has seen this one answer often enough to get several tokens right."""
    drafter = DFlashDrafter(
        drafter_config(target.config, num_hidden_layers=2, **layers),
        DraftShape(4, 310, (1, 3), 6, causal_sliding=SLIDING in layers.get("layer_types", [])),
    )
    drafter.reset_parameters(0)
    ids = torch.tensor([*prompt, *answer])
    with torch.no_grad():
        states = target.model(ids[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[2][0], states[4][0]], dim=-1)
    anchors = list(range(len(prompt), len(ids) - 3))
    wanted = torch.stack([ids[a + 1 : a + 4] for a in anchors])
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    head = head_of(target)
    for _ in range(60):
        logits = train_style(drafter, head, ids, features, anchors)[:, 1:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.requires_grad_(False)


@pytest.mark.parametrize(
    "layers",
    [{}, {"layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": True}],
)
def test_generate_drafts_what_our_chain_drafts(tmp_path, tiny_target, layers):
    """Same text, same target calls, and round by round the same drafts, whole blocks accepted among them."""
    config = load_config(write_config(tmp_path / "config.yaml", tiny_target))
    target = load_target(config.target)
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[3]}], add_generation_prompt=True, return_dict=False
    )
    plain = target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)
    drafter = taught(target, plain[0, len(prompt) :].tolist(), prompt, **layers)
    save_drafter(drafter, drafter.state_dict(), tmp_path, torch.float32)

    assistant = load_assistant(tmp_path, target.model)
    calls, theirs = 0, list[torch.Tensor]()
    forward, head = target.model.model.forward, target.head

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    assistant.register_forward_hook(
        lambda m, a, out: theirs.append(head(out.last_hidden_state[0, 1:]))
    )
    target.model.model.forward = counted
    text = target.model.generate(
        torch.tensor([prompt]), assistant_model=assistant, speculation_type="dflash", do_sample=False, max_new_tokens=40
    )  # fmt: skip
    target.model.model.forward = forward

    ours: list[torch.Tensor] = []

    def propose(logits: torch.Tensor, root: int) -> Any:
        ours.append(logits)
        return propose_chain(logits, root)

    got = decode(target, drafter, head_of(target), prompt, propose, max_new_tokens=40)
    assert text[0, len(prompt) :].tolist() == got.tokens == plain[0, len(prompt) :].tolist()
    assert max(got.committed) == 4 and min(got.committed) < 4
    assert calls == 1 + len(got.committed)
    assert len(theirs) == len(ours) >= 8
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_an_assistant_refuses_another_target(tmp_path, tiny_target):
    folder, model = checkpoint(tmp_path / "a")
    config = load_config(write_config(tmp_path / "config.yaml", tiny_target))
    target = load_target(config.target).model
    with pytest.raises(UserError, match="6 layers, 32 wide; this one has 6 and is 64 wide"):
        load_assistant(folder, target)
    assert load_shape(folder)[1] == model.shape
    folder, model = checkpoint(tmp_path / "b", sample_from_anchor=True)
    with pytest.raises(UserError, match="slot 0 as well"):
        load_assistant(folder, target)
    assert load_shape(folder)[1] == model.shape
