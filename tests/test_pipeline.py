"""The whole pipeline on a tiny target: extract, train, evaluate, and the facts that tie the stages together."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import eval.replay
import extract.main
from configs.load import UserError, load_config
from eval.decode import decode, propose_chain, propose_tree
from eval.live import questions
from eval.replay import replay
from extract.head import load_head
from extract.manifest import read_manifest
from extract.price import bytes_per_token
from extract.regenerate import decode_batch
from extract.shards import ShardReader
from extract.target import load_target
from tests.conftest import QUESTIONS, family, make_target, write_config, write_prompts
from tests.test_eval_served import Engine
from train.batches import StepDataset
from train.build import build_drafter
from train.checkpoint import find_checkpoint
from train.finished import complete_checkpoints
from train.layout import load_drafter, load_shape, save_drafter
from train.startup import make_schedule
from train.step import prepare

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def run(*command: str, status: int = 0, **environment: str) -> str:
    """Run a stage as its user does; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    out = done.stdout + done.stderr
    assert done.returncode == status, out
    # the launcher of several processes has a traceback of its own when one of them fails
    assert "Traceback" not in out or (status and "ChildFailedError" in out), out
    return out


def launch(
    *command: str, processes: int = 1, config_file: str | None = None, status: int = 0
) -> str:
    """accelerate launch, with as many CPU processes."""
    file = config_file or f"configs/accelerate/{'cpu' if processes == 1 else 'cpu2'}.yaml"
    how = ["--config_file", file, "--num_processes", str(processes)]
    return run("-m", "accelerate.commands.launch", *how, *command, status=status)


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def extracted(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose states are there."""
    folder = tmp_path_factory.mktemp("pipeline")
    config = write_config(folder / "config.yaml", tiny_target)
    run("extract/main.py", "--config", str(config))
    return config


def copy_run(config: Path, folder: Path, **train: object) -> Path:
    """The same experiment in another run folder, its states copied."""
    raw = yaml.safe_load(config.read_text())
    source, target = Path(raw["run_dir"]), folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        source, target, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl", "evals")
    )
    raw["run_dir"] = str(target)
    raw["train"].update(train)
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder / "config.yaml"


@pytest.mark.parametrize("from_anchor", [False, True])
def test_overfit_one_sequence_reaches_the_block_size(tiny_target, tmp_path, from_anchor):
    """The alignment test of the whole pipeline (field bug C3): a slot or tap off by one anywhere keeps tau near 1.

    A drafter that samples from the anchor comes from a folder (DeepSpec's layout) and drafts one token more.
    """
    config = write_config(
        tmp_path / "config.yaml",
        tiny_target,
        data={"prompts": [str(write_prompts(tmp_path / "one.jsonl", QUESTIONS[:1]))], "max_new_tokens": 40},
        train={"batch_size": 1, "anchors": 48, "max_steps": 250, "epochs": 250, "learning_rate": 5e-3,
               "log_every": 50, "max_length": 80},
        eval={"prompts": [str(write_prompts(tmp_path / "same.jsonl", QUESTIONS[:1]))], "max_new_tokens": 40,
              "budgets": [4, 8]},
    )  # fmt: skip
    run("extract/main.py", "--config", str(config))
    start: list[str] = []
    if from_anchor:
        model = build_drafter(load_config(config), read_manifest(tmp_path / "run" / "states"))
        model.shape = replace(model.shape, sample_from_anchor=True)
        (tmp_path / "deepspec").mkdir()
        save_drafter(model, model.state_dict(), tmp_path / "deepspec", torch.float32)
        start = ["--set", f"drafter.init_from={tmp_path / 'deepspec'}"]
    run("train/main.py", "--config", str(config), *start)
    run("eval/main.py", "--config", str(config))
    run("eval/main.py", "--config", str(config), "--mode", "live")
    evals = tmp_path / "run" / "evals" / "step-000250"
    for file in (evals / "results.json", evals / "live" / "results.json"):
        rows = {(r["decoder"], r["budget"]): r for r in json.loads(file.read_text())["rows"]}
        for key in (("dflash", None), ("ddtree", 4), ("ddtree", 8)):
            histogram = rows[key]["histogram"]
            assert sum(histogram[:-1]) <= 1, (file, key, histogram)  # the cut last round at most
            assert rows[key]["tau"] > (4.7 if from_anchor else 3.7)


@pytest.fixture(scope="module")
def trained(extracted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A half-trained drafter: right often enough and wrong often enough to exercise every path."""
    config = copy_run(
        extracted,
        tmp_path_factory.mktemp("trained"),
        max_steps=120,
        epochs=60,
        learning_rate=3e-3,
        log_every=40,
    )
    run("train/main.py", "--config", str(config))
    return config


def test_replay_equals_live_list_by_list_and_text_is_plain_greedy(trained, monkeypatch):
    config = load_config(trained)
    run_dir = Path(config.run_dir)
    drafter = load_drafter(complete_checkpoints(run_dir)[-1]).eval()
    target = load_target(config.target, dtype="float32")
    seen = set()
    for states in (run_dir / "eval-sets" / "held" / "states", run_dir / "states"):
        reader = ShardReader(states)
        head = load_head(states, dtype=torch.float32)
        limit = reader.manifest.answers.max_new_tokens or 0
        for i in range(len(reader)):
            sample = reader[i]
            first = len(sample.input_ids) - int(sample.loss_mask.sum())
            prompt, answer = sample.input_ids[:first].tolist(), sample.input_ids[first:].tolist()
            assert decode_batch(target, [prompt], limit)[0][0] == answer
            budgets = [1, 2, 8, 20, 200]
            replayed = replay(drafter, head, sample, budgets)
            for key, got in replayed.items():
                propose = propose_chain if key is None else propose_tree(key)
                live = decode(target, drafter, head, prompt, propose, max_new_tokens=limit)
                assert live.tokens == answer
                assert (live.committed, live.accepted) == (got.committed, got.accepted), (i, key)
                assert sum(got.committed) == len(answer) - 1
                seen.update(got.accepted)
            # the other kind of tree, and another slice of positions at a time
            monkeypatch.setattr(eval.replay, "HOST_SLOTS", 4 * (1 + i % 5))
            kept = replay(drafter, head, sample, budgets[2:], keep_chain=True)
            assert kept[None] == replayed[None]
            propose = propose_tree(8, keep_chain=True)
            live = decode(target, drafter, head, prompt, propose, max_new_tokens=limit)
            assert (live.committed, live.accepted) == (kept[8].committed, kept[8].accepted)
    assert len(seen) >= 3, f"only accepted lengths {seen}: the test has seen too little"


def test_eval_prints_lossless_results_and_draws_a_report(trained, tmp_path):
    out = run("eval/main.py", "--config", str(trained), "--checkpoint", "all")
    assert "next:" in out or "report:" in out
    run_dir = Path(load_config(trained).run_dir)
    chain = {
        file.parent.name: row["tau"]
        for file in (run_dir / "evals").glob("step-*/results.json")
        for row in json.loads(file.read_text())["rows"]
        if row["decoder"] == "dflash"
    }
    assert len(chain) == len(complete_checkpoints(run_dir)) == 4
    best = find_checkpoint(run_dir, "best")
    assert chain[best.name] == max(chain.values()) and f"best of 4: {best.name}" in out
    found = run("eval/main.py", "--config", str(trained), "--checkpoint", "best")
    assert f"{best.name} has replay results" in found
    live = run("eval/main.py", "--config", str(trained), "--mode", "live")
    assert "report:" in live
    last = sorted((run_dir / "evals").iterdir())[-1]
    results = json.loads((last / "live" / "results.json").read_text())
    assert results["lossless_check"]["answers_that_differ"] == 0
    assert all(r["lossless"] for r in results["rows"])
    replayed = {
        (r["decoder"], r["budget"]): r
        for r in json.loads((last / "results.json").read_text())["rows"]
    }
    for row in results["rows"]:
        if row["decoder"] != "autoregressive":
            other = replayed[row["decoder"], row["budget"]]
            assert (row["tau"], row["histogram"]) == (other["tau"], other["histogram"])
    for name in ("tau_vs_budget.png", "tau_vs_step.png", "acceptance_by_position.png", "report.md"):
        assert (last / name).stat().st_size > 500
    again = run("eval/main.py", "--config", str(trained), "--checkpoint", "all")
    assert again.count("has replay results") == len(complete_checkpoints(run_dir))
    other = ["--set", f"target.path={make_target(tmp_path / 'other', seed=5)}", "--again"]
    refused = run("eval/main.py", "--config", str(trained), "--mode", "live", *other, status=2)
    assert "target.fingerprint" in refused

    out = run("eval/main.py", "--config", str(trained), "--trace", "2")
    assert f"{last.name}: the rounds of 2 prompts" in out
    written = re.search(r'id="record">(.*?)</script>', (last / "trace.html").read_text("utf-8"))
    assert written is not None
    for traced in json.loads(written[1])["prompts"]:
        for name, key in (("chain", ("dflash", None)), ("tree", ("ddtree", 20))):
            (row,) = (r for r in results["rows"] if (r["decoder"], r["budget"]) == key)
            (live_prompt,) = (p for p in row["per_prompt"] if p["id"] == traced["id"])
            counts = [r["committed"] for r in traced[name]["rounds"]]
            assert (sum(counts), len(counts)) == (live_prompt["committed"], live_prompt["rounds"])
    too_many = run("eval/main.py", "--config", str(trained), "--trace", "4", status=2)
    assert "--trace 4 asks for more than the 3 held-out prompts" in too_many


def test_sampling_settings_apply_to_live_and_replay_says_so(trained, tmp_path):
    config = copy_run(trained, tmp_path)
    run_dir = Path(load_config(config).run_dir)
    source = complete_checkpoints(Path(load_config(trained).run_dir))[-1]
    shutil.copytree(source, run_dir / "checkpoints" / source.name)
    results = run_dir / "evals" / source.name
    short = ["--set", "eval.budgets=[8]"]  # other settings: no --again is needed
    command = ["eval/main.py", "--config", str(config), *short]

    sampled = ["--set", "eval.temperature=0.9", "--set", "eval.top_p=0.95"]
    named = "eval.temperature=0.9, eval.top_p=0.95"
    assert f"plain greedy decoding; {named} applies to the other" in run(*command, *sampled)
    replayed = json.loads((results / "results.json").read_text())
    assert named in replayed["notes"][0] and {r["temperature"] for r in replayed["rows"]} == {0.0}
    assert "eval.temperature=0.9" in (results / "report.md").read_text()

    assert f"picks its tokens with {named}" in run(*command, *sampled, "--mode", "live")
    live = json.loads((results / "live" / "results.json").read_text())
    assert live["lossless_check"] is None and {r["temperature"] for r in live["rows"]} == {0.9}
    assert {r["decoder"]: r["lossless"] for r in live["rows"]}["ddtree"] is None

    run(*command, "--set", "eval.repetition_penalty=1.3", "--mode", "live")
    live = json.loads((results / "live" / "results.json").read_text())
    check = live["lossless_check"]
    assert check["compared_tokens"] > 0 and check["answers_that_differ"] == 0
    assert all(r["lossless"] for r in live["rows"]) and "repetition_penalty=1.3" in live["notes"][0]


def test_served_reads_from_an_engine_what_live_counts(trained):
    """The server here answers with our own decoding and counts as vLLM does; tests/test_serving.py starts a real vLLM."""
    config = load_config(trained)
    run_dir = Path(config.run_dir)
    checkpoint = complete_checkpoints(run_dir)[-1]
    drafter, target = load_drafter(checkpoint).eval(), load_target(config.target, dtype="float32")
    states = run_dir / "eval-sets" / "held" / "states"
    head, script = load_head(states, dtype=torch.float32), {}
    for q in questions(config, ShardReader(states)):
        live = decode(target, drafter, head, q.prompt, propose_chain, max_new_tokens=20)
        script[tuple(q.prompt)] = live.tokens, live.accepted
    engine = Engine(script)
    evaluate = ("eval/main.py", "--config", str(trained), "--again", "--mode")
    out = run(*evaluate, "served", "--server", engine.url)
    run(*evaluate, "live")
    engine.shutdown()
    assert "3 of 3 answers equal the stored" in out
    folder = run_dir / "evals" / checkpoint.name
    (served,) = json.loads((folder / "served" / "results.json").read_text())["rows"]
    rows = json.loads((folder / "live" / "results.json").read_text())["rows"]
    (chain,) = [row for row in rows if row["decoder"] == "dflash"]
    for key in ("rounds", "tokens", "accepted", "drafted", "accept_at_position", "tau_without_bonus",
                "prompts", "cut_rounds", "short_answers", "repetitive_answers"):  # fmt: skip
        assert served[key] == chain[key], key
    assert served["tau"] == 1 + chain["tau_without_bonus"] >= chain["tau"]


def gradients(config: Path) -> list[dict]:
    return [
        {k: m[k] for k in ("step", "loss", "grad_norm", "tokens")}
        for m in metrics(Path(load_config(config).run_dir))
    ]


def held_out(config: Path) -> list[dict]:
    """What training measured on the held-out set meanwhile, under the names of `gradients`."""
    return [
        {
            "step": m["step"],
            "loss": m["held_out_loss"],
            "grad_norm": m["held_out_tau_proxy"],
            "tokens": 0,
        }
        for m in metrics(Path(load_config(config).run_dir))
    ]


def close(a: list[dict], b: list[dict], tolerance: float) -> None:
    assert [x["step"] for x in a] == [x["step"] for x in b] and len(a) > 2
    for x, y in zip(a, b, strict=True):
        assert x["tokens"] == y["tokens"]
        for key in ("loss", "grad_norm"):
            assert abs(x[key] - y[key]) <= tolerance * max(1.0, abs(y[key])), (key, x, y)


@pytest.mark.parametrize(
    "objective",
    [
        {"weighting": "decay"},
        {"weighting": "uniform"},
        {"weighting": "dpace", "head_tokens": 64},
    ],
    ids=lambda objective: objective["weighting"],
)
def test_one_process_two_processes_and_accumulation_are_the_same_run(
    extracted, tmp_path, objective
):
    """Global numerator over global divisor: rows may be split in any way. In loss, norm and every gradient."""
    runs, first = {}, {}
    for name, processes, train in (
        ("one", 1, {"batch_size": 4}),
        ("accumulated", 1, {"batch_size": 2, "gradient_accumulation_steps": 2}),
        ("two", 2, {"batch_size": 2}),
    ):
        config = copy_run(
            extracted, tmp_path / name, max_steps=4, epochs=9, max_length=48, anchors=40,
            max_grad_norm=1e9, checkpoint_every=1, **objective, **train,
        )  # fmt: skip
        out = launch("train/main.py", "--config", str(config), processes=processes)
        assert f"{processes} processes = 4 rows" in out
        runs[name] = gradients(config)
        state = complete_checkpoints(tmp_path / name / "run")[0] / "resume" / "state.pt"
        moments = torch.load(state, weights_only=True)["optimizer"]["state"]
        # AdamW's first moment after one step is the gradient itself, times 1 - beta
        first[name] = [m["exp_avg"] for m in moments.values()]
    for name in ("accumulated", "two"):
        close(runs[name], runs["one"], 1e-4)
        for ours, whole in zip(first[name], first["one"], strict=True):
            assert whole.any()
            torch.testing.assert_close(ours, whole, rtol=0, atol=2e-6 * float(whole.abs().max()))
    settings = load_config(tmp_path / "accumulated" / "config.yaml")
    reader = ShardReader(tmp_path / "accumulated" / "run" / "states")
    data = StepDataset(
        reader, make_schedule(settings, reader, 1), rank=0, max_length=48, last_hidden=False
    )
    shape = load_shape(find_checkpoint(tmp_path / "accumulated" / "run", "latest"))[1]
    one, other = (float(prepare(half, settings, shape).divisor) for half in data[0])
    assert max(one, other) > 1.2 * min(one, other), "the halves weigh the same: nothing is tested"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stages_give_the_losses_of_plain_training(extracted, tmp_path, stage):
    plain = copy_run(
        extracted, tmp_path / "plain", max_steps=5, epochs=9, max_length=48, batch_size=4
    )
    run("train/main.py", "--config", str(plain))
    cut = copy_run(
        extracted,
        tmp_path / "zero",
        max_steps=5,
        epochs=9,
        max_length=48,
        batch_size=1,
        gradient_accumulation_steps=2,
    )
    out = launch(
        "train/main.py",
        "--config",
        str(cut),
        processes=2,
        config_file=f"configs/accelerate/zero{stage}.yaml",
    )
    assert f"DeepSpeed ZeRO-{stage}" in out and "2 processes = 4 rows" in out
    close(gradients(cut), gradients(plain), 1e-4)
    close(held_out(cut), held_out(plain), 1e-4)
    ours, theirs = (
        load_drafter(complete_checkpoints(Path(load_config(c).run_dir))[-1]) for c in (cut, plain)
    )
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=2e-2, atol=2e-3, msg=name)


def test_every_objective_trains_end_to_end(tiny_target, tmp_path):
    config = write_config(
        tmp_path / "config.yaml",
        tiny_target,
        extract={"store_last_hidden": True},
        train={"max_steps": 40, "epochs": 40, "learning_rate": 5e-3},
    )
    run("extract/main.py", "--config", str(config))
    for name, options in {
        "kl": ["train.distillation=1.0"],
        "mixed": ["train.distillation=0.5", "train.optimizer=muon"],
        "sampled": ["train.head_tokens=64", "drafter.init_from=target"],
        "sampled-mix": ["train.head_tokens=64", "train.distillation=0.5", "train.weighting=dpace"],
    }.items():
        shutil.copytree(tmp_path / "run", tmp_path / name)
        sets = [x for o in (*options, f"run_dir={tmp_path / name}") for x in ("--set", o)]
        run("train/main.py", "--config", str(config), *sets)
        lines = metrics(tmp_path / name)
        assert lines[-1]["loss"] < 0.9 * lines[0]["loss"], (name, lines[0], lines[-1])


def test_extract_is_the_same_for_any_number_of_processes_and_after_a_kill(
    tiny_target, extracted, tmp_path
):
    whole = Path(load_config(extracted).run_dir)
    names = sorted(p.relative_to(whole) for p in whole.glob("**/shard-*.safetensors"))
    assert len(names) >= 4
    config = write_config(tmp_path / "config.yaml", tiny_target)
    for delay in (6.0, 8.0):
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0",
             "extract/main.py", "--config", str(config)],
            cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(delay)
        for member in family(process.pid):
            os.kill(member, signal.SIGKILL)
        process.wait()
    run("extract/main.py", "--config", str(config))
    for name in names:
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes(), name
    run("extract/main.py", "--config", str(config), "--verify")


def test_float8_states_train_and_are_the_same_for_any_number_of_processes(tiny_target, tmp_path):
    config = write_config(
        tmp_path / "config.yaml",
        tiny_target,
        extract={"storage_dtype": "float8_e4m3fn", "store_last_hidden": True},
        train={"max_steps": 6, "epochs": 9, "distillation": 0.5},
    )
    arguments = ["--config", str(config)]
    assert bytes_per_token(3, 64, "float8_e4m3fn", True) == 3 * (64 + 4) + 2 * 64 + 4 + 1
    run("extract/main.py", *arguments)
    pair = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0")
    run(*pair, "extract/main.py", *arguments, "--set", f"run_dir={tmp_path / 'two'}")
    names = sorted(p.name for p in (tmp_path / "run" / "states").glob("shard-*"))
    assert len(names) >= 4
    for name in names:
        one, two = (tmp_path / r / "states" / name for r in ("run", "two"))
        assert one.read_bytes() == two.read_bytes(), name
    assert extract.main.main([*arguments, "--verify"]) == 0
    with pytest.raises(
        UserError, match='storage_dtype="float8_e4m3fn", the config says "bfloat16"'
    ):
        extract.main.main([*arguments, "--set", "extract.storage_dtype=bfloat16"])

    run("train/main.py", *arguments)
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    assert len(losses) == 6 and all(0 < loss < 20 for loss in losses)  # false for NaN
    assert losses[-1] < losses[0]


def test_damage_is_named(extracted, tmp_path):
    config = copy_run(extracted, tmp_path)
    run_dir = Path(load_config(config).run_dir)
    shard = sorted((run_dir / "states").glob("shard-*.safetensors"))[0]
    good = shard.read_bytes()
    shard.write_bytes(good[:-100])
    assert shard.name in run("train/main.py", "--config", str(config), status=2)
    assert shard.name in run("extract/main.py", "--config", str(config), "--verify", status=2)
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert shard.name in run("extract/main.py", "--config", str(config), "--verify", status=2)
    run("extract/main.py", "--config", str(config))  # the shard is made again
    assert shard.read_bytes() == good


def test_states_of_another_target_are_refused(extracted, tmp_path):
    other = make_target(tmp_path / "other", seed=5)
    config = copy_run(extracted, tmp_path / "copy")
    raw = yaml.safe_load(config.read_text())
    raw["target"]["path"] = str(other)
    config.write_text(yaml.safe_dump(raw))
    out = run("extract/main.py", "--config", str(config), status=2)
    assert "target" in out and "extract again" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": {"path": "/does/not/exist"}}, "does not exist"),
        ({"target": {"path": None, "package": "no-such-package"}}, "pip install"),
        ({"drafter": {"target_layer_ids": [1, 6]}}, "has 6 layers"),
        ({"drafter": {"mask_token_id": 320}}, "320 rows"),
        ({"drafter": {"mask_token_id": 5}}, "real text"),
        ({"data": {"prompts": ["nowhere.jsonl"]}}, "nowhere.jsonl"),
    ],
)
def test_mistakes_are_one_sentence_before_any_model_is_loaded(
    tiny_target, tmp_path, change, message
):
    config = write_config(tmp_path / "config.yaml", tiny_target, **change)
    assert message in run("extract/main.py", "--config", str(config), status=2)


def test_a_tokenizer_without_a_template_and_an_empty_prompt_file(tiny_target, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_target, bare)
    (bare / "chat_template.jinja").unlink()
    config = write_config(tmp_path / "config.yaml", bare)
    assert "chat_template_file" in run("extract/main.py", "--config", str(config), status=2)
    template = tmp_path / "t.jinja"
    template.write_text((tiny_target / "chat_template.jinja").read_text())
    run(
        "extract/main.py",
        "--config",
        str(config),
        "--set",
        f"target.chat_template_file={template}",
        "--dry-run",
    )
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    out = run("extract/main.py", "--config", str(config), "--set", f"target.chat_template_file={template}",
              "--set", f"data.prompts=[{empty}]", status=2)  # fmt: skip
    assert "empty" in out


def test_five_mistakes_in_a_config_are_five_lines(tiny_target, tmp_path):
    config = write_config(
        tmp_path / "config.yaml",
        tiny_target,
        train={"learnig_rate": 1, "epochs": "six", "anchors": -1},
        eval={"budget": [1]},
        drafter={"block_size": 1},
    )
    out = run("train/main.py", "--config", str(config), status=2)
    assert "5 mistakes" in out and "train.learning_rate" in out and "eval.budgets" in out


def test_disk_that_is_too_small_is_refused_before_the_first_forward(
    tiny_target, tmp_path, monkeypatch
):
    from configs.provenance import free_space_check

    with pytest.raises(UserError, match="GiB"):
        free_space_check(tmp_path, 1 << 60, "writing states")
