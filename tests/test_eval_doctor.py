"""Every cause of a low tau, put in one at a time, is the first that the doctor names; a healthy run is clean.

The target is a small hybrid one (Gated DeltaNet), the drafter knows its eight training answers by heart, and the held-out
set asks six of the same questions: so that right and wrong are far apart after seconds of training.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import eval.check_drafts
import eval.main
import extract.main
from configs.load import UserError, load_config
from configs.provenance import file_sha256
from eval.gated_delta import GatedDelta
from eval.patient import TRAINING
from eval.selftest import short_test
from extract.head import FILE, load_head
from extract.shards import ShardReader
from extract.target import load_target, record_taps
from tests.conftest import CHATML, QUESTIONS, make_target, write_config, write_prompts
from tests.test_eval_verify import FAMILIES
from train.batches import collate
from train.build import build_drafter
from train.layout import save_drafter
from train.step import loss_of, prepare, run_drafter

pytestmark = pytest.mark.slow
STEPS = 70
TAPS = [1, 3, 4]
# as Qwen3's: an empty thought in front of an answer without thinking
TEMPLATE = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is false %}<t></t>{% endif %}{% endif %}",
)
TEMPLATE = TEMPLATE.replace("is false", "is defined and not enable_thinking")
LINE = re.compile(r"^(\w+): +(ok|SUSPECT|not checkable here)\s?(.*)$", re.M)


def train(config_file: Path, *, shift: int = 0) -> Path:
    """Fit the config's drafter to its states by heart; with `shift` slot k learns token k + shift. Returns its folder."""
    config = load_config(config_file)
    run_dir = Path(config.run_dir)
    reader, head = ShardReader(run_dir / "states"), load_head(run_dir / "states")
    manifest = reader.manifest
    batch = collate(
        [[(i, reader[i])] for i in range(len(reader))], [0] * len(reader), max_length=max(reader.lengths),
        feature_size=len(TAPS) * manifest.hidden_size, feature_dtype=torch.float32, hidden_size=None, seed=0,
    )  # fmt: skip
    drafter = build_drafter(config, manifest)
    part = prepare(batch, config, drafter.shape)
    if shift:
        rolled = replace(batch, input_ids=batch.input_ids.roll(-shift, 1))
        part.targets = prepare(rolled, config, drafter.shape).targets
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        loss = (
            loss_of(run_drafter(drafter, drafter, head, part), head, part, config)[0] / part.divisor
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        losses.append({"step": step + 1, "loss": float(loss.detach())})
    folder = run_dir / "checkpoints" / f"step-{STEPS:06d}"
    folder.mkdir(parents=True)
    save_drafter(drafter, drafter.state_dict(), folder, torch.float32)
    (folder / "DONE").touch()
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
    return folder


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    target = make_target(folder / "target", **FAMILIES["qwen3_5"])
    (target / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "asked").mkdir()
    config = write_config(
        folder / "config.yaml", target,
        target={"enable_thinking": False},
        train={"anchors": 32},
        extract={"store_last_hidden": True},
        eval={
            "prompts": [str(write_prompts(folder / "asked" / "held.jsonl", QUESTIONS[:6]))],
            "max_new_tokens": 24,
        },
    )  # fmt: skip
    assert extract.main.main(["--config", str(config)]) is None
    return config


@pytest.fixture(scope="module")
def trained(extracted: Path) -> Path:
    train(extracted)
    return extracted


def copied(config: Path, folder: Path, **sections: dict[str, Any]) -> Path:
    """The same run in another folder, to be damaged."""
    raw = yaml.safe_load(config.read_text())
    shutil.copytree(raw["run_dir"], folder / "run")
    raw["run_dir"] = str(folder / "run")
    for name, values in sections.items():
        raw[name] |= values
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder / "config.yaml"


@pytest.fixture
def case(trained: Path, tmp_path: Path) -> Path:
    return copied(trained, tmp_path)


@dataclass(frozen=True)
class Report:
    status: int | None
    text: str

    @property
    def suspects(self) -> list[str]:
        return [name for name, verdict, _ in LINE.findall(self.text) if verdict == "SUSPECT"]

    def line(self, name: str) -> str:
        return next(rest for found, _, rest in LINE.findall(self.text) if found == name)


SELF_TESTS: list[Any] = []  # of the one target, asked once: it is most of what a doctor costs here


@pytest.fixture
def doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Report]:
    def once(target: Any, config: Any) -> Any:
        SELF_TESTS[:] = SELF_TESTS or short_test(target, config)
        return SELF_TESTS

    monkeypatch.setattr(eval.check_drafts, "short_test", once)

    def run(config: Path, *more: str) -> Report:
        capsys.readouterr()
        status = eval.main.main(["--config", str(config), "--doctor", *more])
        return Report(status, capsys.readouterr().out)

    return run


def run_dir(config: Path) -> Path:
    return Path(load_config(config).run_dir)


def all_states(config: Path) -> list[Path]:
    return [run_dir(config) / "states", run_dir(config) / "eval-sets" / "held" / "states"]


def rewrite(folder: Path, name: str, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change a float32 tensor of every sample in place: change(input_ids [T], rows [T, ...]) -> rows."""
    for path in sorted(folder.glob("shard-*.safetensors")):
        (size,) = struct.unpack("<Q", path.read_bytes()[:8])
        header = json.loads(path.read_bytes()[8 : 8 + size])
        stored = load_file(path)
        rows = stored[name].clone()
        for a, b in zip(stored["offsets"], stored["offsets"][1:], strict=False):
            rows[a:b] = change(stored["input_ids"][a:b].long(), rows[a:b])
        start = 8 + size + header[name]["data_offsets"][0]
        with path.open("rb+") as file:
            file.seek(start)
            file.write(np.ascontiguousarray(rows.numpy()).tobytes())


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def checkpoint(config: Path) -> Path:
    return run_dir(config) / "checkpoints" / f"step-{STEPS:06d}"


def test_a_healthy_run_is_clean(trained, doctor):
    report = doctor(trained)
    assert report.status == 0 and report.suspects == [], report.text
    found = {name: verdict for name, verdict, _ in LINE.findall(report.text)}
    assert set(found.values()) == {"ok"} and list(found) == list(eval.doctor.CHECKS), report.text
    assert "nothing is wrong; tau 3." in report.text
    assert "14 of 14 stored prompts" in report.line("prompts")


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("which", [0, 1], ids=["training", "held-out"])
def test_states_of_the_layer_beside(case, doctor, shift, which):
    config = load_config(case)
    target = load_target(config.target, dtype="float32")
    layers = [i + shift for i in TAPS]

    def neighbours(ids: Tensor, _: Tensor) -> Tensor:
        with torch.inference_mode(), record_taps(target.layers, layers) as recorded:
            target.decoder(input_ids=ids[None])
        return recorded.features(target.device)[0].clone()

    rewrite(all_states(case)[which], "hidden_states", neighbours)
    report = doctor(case)
    assert report.status == 1 and report.suspects[0] == "taps", report.text
    assert f"a layer {'below' if shift < 0 else 'above'}" in report.line("taps")


def test_states_a_token_late(case, doctor):
    rewrite(all_states(case)[1], "hidden_states", lambda _, rows: rows.roll(1, 0))
    report = doctor(case)
    assert report.suspects[0] == "taps" and "a token before" in report.line("taps"), report.text


def test_a_checkpoint_that_reads_the_layers_beside(case, doctor):
    file = checkpoint(case) / "config.json"
    nested = json.loads(file.read_text())["dflash_config"]
    edit(file, dflash_config=nested | {"target_layer_ids": [2, 4, 5]})
    report = doctor(case)
    assert report.status == 1 and report.suspects == ["taps"], report.text
    assert "reads layers [2, 4, 5], training states hold [1, 3, 4]" in report.line("taps")


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("zero or constant", lambda _, rows: rows.index_fill(0, torch.tensor([5]), 0.0)),
        ("zero or constant", lambda _, rows: rows.index_fill(0, torch.tensor([5]), 0.3)),
        ("NaN or Inf", lambda _, rows: rows.index_fill(0, torch.tensor([5]), math.nan)),
        ("equal to another token's", lambda _, rows: rows[:1].expand_as(rows)),
    ],
)
@pytest.mark.parametrize("which", [0, 1], ids=["training", "held-out"])
def test_rows_that_no_target_makes(case, doctor, what, change, which):
    rewrite(all_states(case)[which], "hidden_states", change)
    report = doctor(case)
    assert report.status == 1 and report.suspects == ["states"], report.text
    assert what in report.line("states")


@pytest.mark.parametrize("name", ["embedding", "weight"])
def test_another_targets_head(case, doctor, name):
    states = all_states(case)[1]
    with_use = json.dumps({"scale": 1.0, "soft_cap": None})
    tables = load_file(states / FILE)
    tables[name] = tables[name].roll(1, 0)
    save_file(tables, states / FILE, metadata={"use": with_use})
    manifest = json.loads((states / "manifest.json").read_text())
    head = manifest["target_head"] | {"sha256": file_sha256(states / FILE)}
    edit(states / "manifest.json", target_head=head)
    report = doctor(case)
    assert report.status == 1 and report.suspects[0] == "head", report.text
    assert "held: rows" in report.line("head")


def test_last_states_from_before_the_final_norm(case, doctor):
    target = load_target(load_config(case).target, dtype="float32")

    def raw(ids: Tensor, _: Tensor) -> Tensor:
        with torch.inference_mode(), record_taps(target.layers, [5]) as recorded:
            target.decoder(input_ids=ids[None])
        return recorded.features(target.device)[0].clone()

    rewrite(all_states(case)[0], "last_hidden", raw)
    report = doctor(case)
    assert report.suspects == ["head"] and "before the final norm" in report.line("head")


def test_another_thinking_mode(case, doctor):
    asked = doctor(case, "--set", "target.enable_thinking=true")
    assert asked.status == 1 and asked.suspects == ["prompts"], asked.text
    assert "training states False, held False, config True" in asked.line("prompts")
    edit(all_states(case)[1] / "manifest.json", enable_thinking=True)
    mixed = doctor(case)
    assert mixed.suspects == ["prompts"]
    assert "training states False, held True" in mixed.line("prompts")


def test_prompts_of_another_template(case, doctor, tmp_path):
    file = tmp_path / "other.jinja"
    file.write_text(TEMPLATE.replace("<t></t>", "<t>\n</t>"))
    report = doctor(case, "--set", f"target.chat_template_file={file}")
    assert report.status == 1 and report.suspects == ["prompts"], report.text
    assert report.line("prompts").startswith("0 of 8 stored prompts")


def test_the_prompts_files_are_not_needed(case, doctor):
    gone = ["--set", "data.prompts=[gone.jsonl]", "--set", "eval.prompts=[held.jsonl]"]
    assert "0 of 0 stored prompts" in doctor(case, *gone).line("prompts")
    for states in all_states(case):
        edit(states / "manifest.json", template_hash="0" * 64)
    report = doctor(case, *gone)
    assert report.suspects == ["prompts"] and "chat template: " in report.line("prompts")


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        ({}, "SUSPECT"),
        ({"source": "given", "greedy": False, "temperature": None}, "SUSPECT"),
        (
            {"greedy": False, "temperature": 1.0},
            "ok",
        ),  # the target's own, and seldom its first choice
    ],
)
def test_somebody_elses_answers(case, doctor, made, verdict):
    states = all_states(case)[0]
    target = load_target(load_config(case).target, dtype="float32")
    random = torch.Generator().manual_seed(0)
    rewrite(
        states, "input_ids",
        lambda _, ids: torch.cat([ids[:-15], torch.randint(5, 290, (15,), generator=random).int()]),
    )  # fmt: skip
    rewrite(
        states, "hidden_states", lambda ids, _: target.forward_taps(ids[None], TAPS)[0][0].clone()
    )
    rewrite(
        states, "last_hidden", lambda ids, _: target.forward_taps(ids[None], TAPS)[1][0].clone()
    )
    answers = json.loads((states / "manifest.json").read_text())["answers"]
    edit(states / "manifest.json", answers=answers | made)
    report = doctor(case)
    assert ("answers", verdict) in [found[:2] for found in LINE.findall(report.text)], report.text
    assert [name for name in report.suspects if name != "overfit"] == (
        ["answers"] if verdict == "SUSPECT" else []
    )
    assert (f"of the tokens of {TRAINING}" in report.line("answers")) == (verdict == "SUSPECT")


def test_a_window_that_training_had_not(case, doctor):
    window = {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 4,
        "use_sliding_window": True,
    }
    edit(checkpoint(case) / "config.json", **window)
    report = doctor(case)
    assert report.status == 1 and report.suspects[0] == "sliding", report.text
    assert "it was trained with no window" in report.line("sliding")


def test_another_rope(case, doctor):
    edit(
        checkpoint(case) / "config.json",
        rope_parameters={"rope_type": "default", "rope_theta": 3.0},
    )
    report = doctor(case)
    assert report.status == 1 and report.suspects == ["rope"], report.text
    assert "theta 3, the target's is theta 10000" in report.line("rope")
    assert "write rope_parameters theta 10000" in report.line("rope")


def test_rejected_tokens_in_the_recurrent_state(trained, doctor, monkeypatch):
    clean = GatedDelta.commit

    def dirty(self: GatedDelta, path: list[int]) -> None:
        assert self.pending is not None
        clean(self, range(self.pending.keys.shape[1]))

    monkeypatch.setattr(GatedDelta, "commit", dirty)
    monkeypatch.setattr(eval.check_drafts, "short_test", short_test)
    report = doctor(trained)
    assert report.status == 1 and report.suspects == ["recurrent"], report.text
    assert "rejected tokens stay in the target's recurrent state" in report.line("recurrent")


@pytest.mark.parametrize("shift", [-1, 1])
def test_slots_that_draft_the_token_beside(extracted, doctor, tmp_path, shift):
    case = copied(extracted, tmp_path)
    shutil.rmtree(run_dir(case) / "checkpoints", ignore_errors=True)
    file = train(case, shift=shift) / "config.json"
    report = doctor(case)
    assert report.status == 1 and report.suspects[0] == "slots", report.text
    assert f"every slot drafts the token {shift:+d} beside its own" in report.line("slots")
    if shift == 1:  # as a drafter that samples from the anchor does, whose slot 0 drafts as well
        assert "write sample_from_anchor=true" in report.line("slots")
        said = json.loads(file.read_text())["dflash_config"] | {"sample_from_anchor": True}
        edit(file, dflash_config=said)
        assert "slots" not in doctor(case).suspects


def test_a_window_that_is_lost(extracted, doctor, tmp_path):
    sliding = {"sliding_layers": [0, 1], "sliding_window": 4, "causal_sliding": True}
    raw = yaml.safe_load(extracted.read_text())
    case = copied(extracted, tmp_path, drafter=raw["drafter"] | sliding)
    shutil.rmtree(run_dir(case) / "checkpoints", ignore_errors=True)
    file = train(case) / "config.json"
    assert doctor(case).status == 0
    edit(file, is_causal=False)
    report = doctor(case)
    assert report.status == 1 and report.suspects[0] == "sliding", report.text
    assert "it was trained with causal blocks" in report.line("sliding")
    edit(file, layer_types=["full_attention"] * 2, is_causal=False, sliding_window=None)
    report = doctor(case)
    assert report.status == 1 and report.suspects[0] == "sliding", report.text
    assert "it was trained with drafter.sliding_window=4 causal" in report.line("sliding")


def test_learnt_by_heart(case, doctor, tmp_path):
    other = write_prompts(
        tmp_path / "held.jsonl", ["Hello?", "What now?", "Why not?", "Where to?", "And then?"]
    )
    shutil.rmtree(all_states(case)[1].parent)
    here = ["--set", f"eval.prompts=[{other}]"]
    assert extract.main.main(["--config", str(case), *here]) is None
    report = doctor(case, *here)
    assert report.status == 1 and report.suspects == ["overfit"], report.text


def test_too_little_training_is_innocent(case, doctor):
    log = run_dir(case) / "metrics.jsonl"
    log.write_text(
        "".join(json.dumps({"step": i, "loss": 9 - i / 10}) + "\n" for i in range(1, 41))
    )
    assert (
        "loss 5.700 -> 5.200 within the last quarter of 40 steps, still falling"
        in doctor(case).text
    )
    log.write_text("".join(json.dumps({"step": i, "loss": 3.0}) + "\n" for i in range(1, 41)))
    assert "flat" in doctor(case).text


def test_what_a_check_lacks_is_said(case, doctor):
    shutil.rmtree(all_states(case)[0])
    report = doctor(case, "--set", "extract.backend=vllm")
    assert report.status == 0
    unknown = [name for name, verdict, _ in LINE.findall(report.text) if verdict.startswith("not")]
    assert unknown == ["taps", "head", "answers", "recurrent", "overfit"], report.text


def test_mistakes_are_user_errors(case):
    command = ["--config", str(case), "--doctor"]
    with pytest.raises(UserError, match="one checkpoint"):
        eval.main.main([*command, "--checkpoint", "all"])
    with pytest.raises(UserError, match="there is no checkpoint step-9"):
        eval.main.main([*command, "--checkpoint", "step-9"])
    edit(all_states(case)[1] / "manifest.json", mask_token_id=7)
    with pytest.raises(UserError, match="mask_token_id=7"):
        eval.main.main(command)
