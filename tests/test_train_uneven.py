"""Rows that hold several samples, and a rank that has none: everybody keeps step, and the run is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_config
from extract.shards import ShardReader
from tests.test_pipeline import close, copy_run, extracted, gradients, launch, run
from train.batches import pack

__all__ = ["extracted"]  # a fixture
pytestmark = pytest.mark.slow

PACKED = {"max_length": 120, "epochs": 4, "batch_size": 4}


@pytest.fixture(scope="module")
def alone(extracted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, all four rows in every step."""
    config = copy_run(extracted, tmp_path_factory.mktemp("alone"), **PACKED)
    lengths = ShardReader(Path(load_config(config).run_dir) / "states").lengths
    rows = pack(lengths, 120)
    assert sorted(map(len, rows)) == [2] * 4 and max(lengths) < 120
    run("train/main.py", "--config", str(config))
    return config


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_rank_without_a_row_goes_through_every_step(alone, extracted, tmp_path, stage):
    """Two processes of four rows each, of which there are four: the second has nothing but padding, all of the time."""
    config = copy_run(extracted, tmp_path, **PACKED)
    file = None if stage is None else f"configs/accelerate/zero{stage}.yaml"
    out = launch("train/main.py", "--config", str(config), processes=2, config_file=file)
    assert "2 processes = 8 rows" in out
    close(gradients(config), gradients(alone), 1e-4)
