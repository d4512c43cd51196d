"""`--describe` and `--dry-run` against recounts by hand on tiny runs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from configs.load import UserError
from configs.schema import TargetConfig
from extract.main import main
from extract.manifest import read_manifest
from extract.price import amount, bytes_per_token, decoding_rate
from extract.prompts import Renderer
from extract.regenerate import answers_so_far, decode_batch
from extract.shards import ShardReader
from extract.target import load_target
from tests.conftest import QUESTIONS, write_config

LOOP = "yes no " * 12
TALK = "The sea is wide, cold, old and full of fish."


def chat(name: str, *texts: str) -> dict[str, object]:
    """Question, answer, question, ..."""
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return {"id": name, "messages": turns}


def experiment(
    folder: Path, target: Path, chats: Sequence[dict[str, object]], **data: object
) -> Path:
    prompts = folder / "mine.jsonl"
    prompts.write_text("".join(json.dumps(c) + "\n" for c in chats))
    return write_config(
        folder / "config.yaml",
        target,
        data={"prompts": [str(prompts)], **data},
        extract={"store_last_hidden": True},
        train={"max_length": 40},
    )


def stopping(source: Path, folder: Path) -> Path:
    """The tiny target with a second stop token, in its generation config alone, that ends about half of its answers."""
    shutil.copytree(source, folder)
    target = load_target(TargetConfig(path=str(folder), dtype="float32", device="cpu"))
    renderer = Renderer(target.tokenizer, enable_thinking=None)
    prompts = [renderer.prompt_ids([{"role": "user", "content": q}]) for q in QUESTIONS]
    answers = [ids for ids, _ in decode_batch(target, prompts, 24)]
    said = Counter(token for ids in answers for token in set(ids[2:]) - set(ids[:2]))
    stop = min(said, key=lambda token: abs(said[token] - len(answers) // 2))
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"eos_token_id": [target.tokenizer.eos_token_id, stop]}))
    return folder


@pytest.fixture(scope="module")
def own(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own answers. 'twice' asks the question of q0 and then another."""
    folder = tmp_path_factory.mktemp("own")
    chats = [chat(f"q{i}", q, TALK) for i, q in enumerate(QUESTIONS)]
    chats += [chat("twice", QUESTIONS[0], TALK, "And now?"), chat("held", "  hello? ", TALK)]
    config = experiment(folder, stopping(tiny_target, folder / "target"), chats)
    assert main(["--config", str(config)]) is None
    return config


@pytest.fixture(scope="module")
def given(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody else's answers: two the same, one of them a loop; 'b' has two turns."""
    chats = [
        chat("a", "One?", LOOP),
        chat("b", "Two?", TALK, "And?", "Nothing."),
        chat("c", "Three?", TALK),
    ]
    config = experiment(tmp_path_factory.mktemp("given"), tiny_target, chats, regenerate=False)
    assert main(["--config", str(config)]) is None
    return config


Lines = dict[tuple[str, str], str]


def described(
    config: Path, capsys: pytest.CaptureFixture[str], *more: str, mode: str = "--describe"
) -> tuple[Lines, str]:
    """The lines by set and fact, the last of each, and the warnings."""
    capsys.readouterr()
    assert main(["--config", str(config), mode, *more]) is None
    out, warnings = capsys.readouterr()
    found = re.findall(r"^(\w+): +(\w+) +(.*)$", out, re.M)
    return {(name, what): text for name, what, text in found}, warnings


def run_dir(config: Path) -> Path:
    return Path(yaml.safe_load(config.read_text())["run_dir"])


def test_every_figure_equals_a_recount(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = described(own, capsys)
    rows = answers_so_far(run_dir(own) / "conversations")
    totals = read_manifest(run_dir(own) / "states").totals
    assert len(rows) == len(QUESTIONS) + 3
    answers = [row.answer_ids for row in rows]
    assert lines["training", "samples"] == f"{totals.samples:,}, {totals.tokens:,} tokens"
    share = f"{sum(map(len, answers)) / totals.tokens:.1%}"
    assert lines["training", "supervised"] == (
        f"{sum(map(len, answers)):,} tokens, {share}, in {len(rows)} answers"
    )
    stops = sum(row.stop_reason == "stop" for row in rows)
    assert 0 < stops < len(rows)  # otherwise this says nothing
    assert lines["training", "ended"].startswith(f"{stops} stop, {len(rows) - stops} length")
    for what, lengths in (
        ("prompt", sorted(len(r.prompt_ids) for r in rows)),
        ("answer", sorted(map(len, answers))),
    ):
        text = lines["training", what]
        assert f"min {lengths[0]}," in text and f"max {lengths[-1]}" in text
        assert f"p50 {lengths[(len(lengths) - 1) // 2]}," in text
    same_answers = len(answers) - len({tuple(a) for a in answers})
    assert re.match(rf"1 prompts .* {same_answers} answers", lines["training", "duplicates"])
    within = sum(
        len(r.prompt_ids) + k + 2 <= 40 for r in rows for k in range(len(r.answer_ids) - 1)
    )
    anchors = sum(len(a) - 1 for a in answers)
    assert lines["training", "anchors"] == (
        f"{anchors} usable, {within} within train.max_length 40"
    )
    assert 0 < within < anchors
    assert lines["held", "contaminated"] == "1 of 3 prompts are training prompts too (q0)"


def test_own_answers_are_the_greedy_choice(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, warnings = described(own, capsys)
    tokens = read_manifest(run_dir(own) / "states").totals
    assert lines["training", "greedy"].startswith(
        f"100.00% of {tokens.supervised_tokens:,} supervised tokens"
    )
    assert "stored last_hidden" in lines["training", "greedy"]
    assert (
        lines["held", "greedy"].startswith("100.00% of")
        and "by the target in float32" in lines["held", "greedy"]
    )
    assert "are what the target would say" not in warnings


def test_foreign_answers_are_found_out(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, warnings = described(given, capsys)
    percent = float(lines["training", "greedy"].partition("%")[0])
    assert percent < 30
    assert re.search(r"warning: \d+% of the supervised tokens of training are what", warnings)
    assert "set data.regenerate" in warnings
    assert lines["training", "supervised"].endswith("in 4 answers")
    assert lines["training", "ended"].startswith("4 stop, 0 length")
    assert lines["training", "loops"].startswith("1 answers (25.0%)")
    assert lines["training", "duplicates"].startswith("0 prompts (0.0%), 1 answers (25.0%)")


def test_both_ways_of_asking_agree(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_states, _ = described(given, capsys)
    bare = tmp_path / "bare"  # nothing extracted: the files' answers, and the target itself
    by_target, warnings = described(given, capsys, "--set", f"run_dir={bare}")
    assert by_target["training", "progress"].startswith("unfinished: 4 answers in the files")
    share = by_states["training", "greedy"].partition(" (")[0]
    assert by_target["training", "greedy"].partition(" (")[0] == share
    assert "set data.regenerate" in warnings and not bare.exists()


def test_sampled_answers_are_not_suspected(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_dir(given), tmp_path / "run")
    file = tmp_path / "run" / "states" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["answers"] = {
        "source": "regenerated", "greedy": False, "max_new_tokens": 24, "temperature": 1.0,
    }  # fmt: skip
    file.write_text(json.dumps(manifest))
    here = ("--set", f"run_dir={tmp_path / 'run'}")
    assert "warning: " not in described(given, capsys, *here)[1]
    manifest["answers"] |= {"greedy": True, "temperature": 0.0}
    file.write_text(json.dumps(manifest))
    assert "is it the same target" in described(given, capsys, *here)[1]


def test_an_unfinished_extraction(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    here = ("--set", f"run_dir={run}")
    lines, _ = described(own, capsys, *here)
    assert lines["training", "progress"] == "unfinished: 0 of at most 11 answers, no states yet"
    assert ("training", "samples") not in lines

    shutil.copytree(run_dir(own), run)
    states = run / "states"
    whole = read_manifest(states).totals.tokens
    manifest = json.loads((states / "manifest.json").read_text())
    first, *others = manifest["shards"]
    assert others
    manifest |= {"complete": False, "target_head": None, "shards": []}
    manifest["totals"] = dict.fromkeys(manifest["totals"], 0)
    (states / "manifest.json").write_text(json.dumps(manifest))
    for entry in others:
        (states / entry["file"]).unlink()
        (states / entry["file"]).with_suffix(".json").unlink()
    lines, warnings = described(own, capsys, *here)
    assert lines["training", "progress"] == (
        f"unfinished: 11 of at most 11 answers, states of {first['tokens']} of {whole} tokens in 1 shards"
    )
    assert lines["training", "greedy"].startswith("100.00%")  # the target was asked
    assert lines["held", "progress"].startswith("complete: ")
    assert "are what the target would say" not in warnings

    # an answer is missing, and an older run's file is in its place
    shutil.rmtree(states)
    stale = run / "conversations" / "turn0-batch-000000.jsonl"
    head, *rows = stale.read_text().splitlines()
    stale.write_text("\n".join([head.replace('"stamp": "', '"stamp": "x'), *rows]) + "\n")
    os.utime(stale, (0, 0))
    lines, _ = described(own, capsys, *here)
    left = 11 - len(rows)
    assert (
        lines["training", "progress"] == f"unfinished: {left} of at most 11 answers, no states yet"
    )
    assert lines["training", "supervised"].endswith(f"in {left} answers")


def test_another_target_is_not_asked(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_dir(own), tmp_path / "run")
    file = tmp_path / "run" / "eval-sets" / "held" / "states" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["target"]["fingerprint"] = "another"
    file.write_text(json.dumps(manifest))
    lines, _ = described(own, capsys, "--set", f"run_dir={tmp_path / 'run'}")
    assert (
        "unknown: the states were made by a target with the fingerprint another"
        in lines["held", "greedy"]
    )


def test_describing_leaves_the_run_as_it_is(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> list[tuple[str, int]]:
        files = own.parent.rglob("*")
        return sorted((str(f), f.stat().st_mtime_ns) for f in files)

    before = state()
    described(own, capsys)
    assert state() == before


# --- the price --------------------------------------------------------------------------------------------------------


def price(config: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    capsys.readouterr()
    assert main(["--config", str(config), "--dry-run", *more]) is None
    return capsys.readouterr().out


def test_bytes_of_a_token_by_hand() -> None:
    ids_and_mask = 4 + 1
    assert bytes_per_token(5, 4096, "bfloat16", False) == ids_and_mask + 5 * 4096 * 2
    assert bytes_per_token(5, 4096, "float32", True) == ids_and_mask + 6 * 4096 * 4
    assert bytes_per_token(5, 4096, "float8_e4m3fn", False) == ids_and_mask + 5 * (4096 + 4)
    assert bytes_per_token(3, 64, "float8_e4m3fn", True) == ids_and_mask + 3 * 68 + 64 * 2
    # the paper's 800 K chats of 1 K tokens
    assert amount(800_000 * 1024 * bytes_per_token(5, 4096, "bfloat16", False)) == "33.6 TB"
    assert [amount(n) for n in (999, 1000, 12_340, 2.5e9, 456e9)] == [
        "999 bytes", "1 kB", "12.3 kB", "2.5 GB", "456 GB",
    ]  # fmt: skip


def test_the_price_of_given_answers_is_what_extraction_stores(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = ShardReader(run_dir(given) / "states")
    total = read_manifest(reader.folder).totals
    out = price(given, capsys, "--set", f"run_dir={tmp_path / 'no' / 'run'}")
    rest = total.tokens - total.supervised_tokens
    assert re.search(
        rf"^tokens: +{total.tokens}: {rest} of 3 prompts, {total.supervised_tokens} of 4 answers$",
        out, re.M,
    )  # fmt: skip
    size = total.tokens * bytes_per_token(3, 64, "float32", True)
    assert f" {amount(size)} of states" in out and size < total.bytes < 1.2 * size + 4096
    assert re.search(r"^hours: +\d.*: 0.00 for answers, ", out, re.M)
    # taps 3 is the chosen number; its row with last_hidden ends in the starred float32
    assert re.search(rf"^price: +3 +yes .* {re.escape(amount(size))}\*$", out, re.M)
    assert len(re.findall(r"^price: +[35] +(?:yes|no) ", out, re.M)) == 4
    assert out.count("*\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_price_of_own_answers_is_an_upper_bound(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = read_manifest(run_dir(own) / "states").totals
    rows = answers_so_far(run_dir(own) / "conversations")
    out = price(own, capsys)
    found = re.search(
        r"^tokens: +at most (\d+): (\d+) of 10 prompts, (\d+) of 11 answers$", out, re.M
    )
    assert found and int(found[3]) == 11 * 24
    assert total.tokens <= int(found[1]) <= total.tokens + 11 * 24
    assert re.search(r"^hours: .*with 1 process on this machine$", out, re.M)
    assert re.search(r"^disk: .* free: fits$", out, re.M)
    assert "dropped:" not in out
    # 'twice' is the only chat of two turns: its first prompt and answer may be stored twice
    apart = re.search(r"^turns: .* if nowhere (\d+) tokens", out, re.M)
    once = min(len(row.prompt_ids) for row in rows if row.chat_id == "twice")
    assert apart and int(apart[1]) == int(found[1]) + once + 24

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    lengths = sorted(len(row.prompt_ids) for row in rows if row.chat_id != "twice")
    limit = lengths[len(lengths) // 2]
    out = price(own, capsys, "--set", f"data.max_prompt_tokens={limit}")
    assert re.search(r"^hours: .*with 4 processes on this machine$", out, re.M)
    assert re.search(r"^disk: .* 1 kB free: DOES NOT FIT, .* are missing$", out, re.M)
    assert f"dropped:  {sum(n > limit for n in lengths)} chats" in out and lengths[-1] > limit
    with pytest.raises(UserError, match=r"chats of data\.prompts are dropped"):
        price(own, capsys, "--set", "data.max_prompt_tokens=1")


def test_a_busy_machine_makes_no_rate_of_millions():
    """240 prompts, 8 more tokens each in 4 s; then the short run, prompts alone, is as slow as the long one."""
    assert decoding_rate(2.0, 240, 6.0, 2160) == 480
    for first in (6.0, 5.99, 7.5):
        assert decoding_rate(first, 240, 6.0, 2160) == 360
    assert decoding_rate(1.0, 240, 2.0, 240) == 120  # all answers end with their first token
