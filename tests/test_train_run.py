"""A training run's record read line by line, and what it keeps on the disk, as its user starts it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from configs.load import load_config
from extract.shards import ShardReader
from tests.conftest import make_target, write_config
from tests.test_pipeline import metrics, run
from tests.test_train_checkpoint import names
from tests.test_train_state import poison, poisoned_steps
from train.checkpoint import find_checkpoint, record_best
from train.finished import complete_checkpoints
from train.optimizer import learning_rate_factor

pytestmark = pytest.mark.slow

WANTED = {
    "step", "epoch", "tokens", "loss", "accuracy", "accuracy_at_position", "tau_proxy", "lr", "grad_norm",
    "skipped_steps", "tokens_per_second", "slots_per_second", "data_wait", "seconds", "compiled_graphs",
    "peak_memory_bytes",
}  # fmt: skip
ACCUMULATED = {"batch_size": 1, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States whose target is gone: of its weights, training needs what extraction has kept."""
    folder = tmp_path_factory.mktemp("run")
    file = write_config(
        folder / "config.yaml",
        make_target(folder / "target"),
        train={"epochs": 3, "max_length": 48, "warmup_ratio": 0.4, "learning_rate": 0.002, "checkpoint_every": 2,
               "keep_checkpoints": 2, **ACCUMULATED},
    )  # fmt: skip
    run("extract/main.py", "--config", str(file))
    for weights in (folder / "target").glob("*.safetensors"):
        weights.unlink()
    return file


@pytest.fixture(scope="module")
def finished(config: Path) -> Path:
    run("train/main.py", "--config", str(config))
    return Path(load_config(config).run_dir)


def test_each_line_is_of_an_optimizer_step(config: Path, finished: Path) -> None:
    """Eight rows in steps of two micro-batches of one: four steps an epoch, each with a learning rate of its own."""
    lengths = ShardReader(finished / "states").lengths
    assert len(lengths) == 8 and min(lengths) > 48, "each sample fills a row"
    lines = metrics(finished)
    assert [line["step"] for line in lines] == [*range(1, 13)]
    for line in lines:
        step = line["step"] - 1
        assert line.keys() - {"held_out_loss", "held_out_tau_proxy"} == WANTED
        assert line["epoch"] == step // 4 and line["tokens"] == 2 * 48
        assert line["lr"] == pytest.approx(0.002 * learning_rate_factor(step, 12, 0.4))
        assert len(line["accuracy_at_position"]) == 3 and 1 <= line["tau_proxy"] <= 4
        assert 0 <= line["data_wait"] < 1 and line["grad_norm"] > 0
    assert len({line["lr"] for line in lines}) > 8


def test_the_best_and_the_newest_outlive_a_resume(config: Path, finished: Path) -> None:
    assert names(finished) == ["step-000010", "step-000012"]
    best, last = complete_checkpoints(finished)
    record_best(finished, best, 2.0, "chain")
    before = metrics(finished)[-1]["loss"]
    shutil.rmtree(last)
    resume = ("train/main.py", "--config", str(config), "--resume", "--set")
    run(*resume, "train.checkpoint_every=1", "--set", "train.keep_checkpoints=1")
    assert names(finished) == ["step-000010", "step-000012"]
    assert find_checkpoint(finished, "best") == best
    assert [line["step"] for line in metrics(finished)] == [*range(1, 13)]
    assert metrics(finished)[-1]["loss"] == before


def test_bfloat16_is_of_the_arithmetic_alone(config: Path, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "states", tmp_path / "states")
    run(
        "train/main.py",
        "--config",
        str(config),
        "--set",
        f"run_dir={tmp_path}",
        "--set",
        "train.precision=bf16",
    )
    exact, rounded = ([line["loss"] for line in metrics(f)] for f in (finished, tmp_path))
    assert exact[0] != rounded[0] and rounded == pytest.approx(exact, rel=0.02)


def test_skipped_steps_that_do_not_follow_each_other_end_nothing(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    """One bad sample in eight, in each of twelve epochs: more than the ten in a row that end a run."""
    (tmp_path / "run").mkdir()
    shutil.copytree(finished / "states", tmp_path / "run" / "states")
    again = tmp_path / "config.yaml"
    text = config.read_text().replace(str(finished), str(tmp_path / "run"))
    again.write_text(text.replace("epochs: 3", "epochs: 12\n  max_steps: 48\n  nonfinite: skip"))
    name = poison(again, 3)
    out = run("train/main.py", "--config", str(again))
    bad = poisoned_steps(again, 3, world=1)
    assert len(bad) == 12 and out.count(f"stored states: {name} (rank 0)") == 12
    assert [line["step"] for line in metrics(tmp_path / "run")] == [
        step for step in range(1, 49) if step not in bad
    ]
