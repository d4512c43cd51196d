"""A real vLLM serves our checkpoint folder, and its speculators export, and accepts what we accept."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.load import load_config
from extract.locate import locate, unpack_gguf
from extract.shards import ShardReader
from tests.test_pipeline import run
from train import export
from train.finished import complete_checkpoints

pytestmark = [pytest.mark.serving, pytest.mark.slow]
# The drafter trains on the very prompts that it is measured on, so that a minute makes it right often, and a mistake of
# either side costs acceptance that shows.
SETTINGS = {
    "data.max_samples": 12,
    "data.max_new_tokens": 40,
    "train.batch_size": 2,
    "train.max_steps": 120,
    "train.epochs": 120,
    "train.learning_rate": 5e-3,
    "train.checkpoint_every": 120,
    "eval.prompts": "[eval/prompts/math.jsonl]",
    "eval.max_prompts": 12,
    "eval.live_prompts": 12,
    "eval.max_new_tokens": 40,
    "eval.budgets": "[]",
}


@contextmanager
def vllm(target: Path, drafter: Path | None, log: Path) -> Iterator[str]:
    """vLLM on loopback. In float32 its text is ours, and with the text the rounds.

    Without a drafter, `target` is an export in the speculators layout, which names its target itself.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative: list[str] = []
    if drafter is not None:
        size = json.loads((drafter / "config.json").read_text())["block_size"]
        options = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": size - 1}
        speculative = ["--speculative-config", json.dumps(options)]
    command = [
        os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server",
        "--host", "127.0.0.1", "--port", str(port), "--model", str(target), "--dtype", "float32",
        *speculative, "--enforce-eager", "--max-model-len", "1024",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with log.open("wb") as out:
        server = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env={**kept, **offline, "VLLM_CPU_KVCACHE_SPACE": "2"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        else:
            pytest.fail(f"vLLM did not start in ten minutes: {log.read_text()[-3000:]}")
        yield url
    finally:
        server.terminate()
        server.wait(60)


def chain(run_dir: Path, mode: str) -> dict[str, Any]:
    (file,) = run_dir.glob(f"evals/*/{mode}/results.json")
    rows = json.loads(file.read_text())["rows"]
    (row,) = [row for row in rows if row["decoder"] == "dflash"]
    return dict(row)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """A run folder with one checkpoint and its live evaluation, and the arguments that made it."""
    folder = tmp_path_factory.mktemp("served") / "run"
    learnt = folder.parent / "learnt.jsonl"  # a copy: a file that is also trained on is refused
    shutil.copy("eval/prompts/math.jsonl", learnt)
    settings = SETTINGS | {
        "run_dir": folder,
        "data.prompts": f"[{learnt}]",
        "tracking.wandb": "disabled",
    }
    sets = [x for key, value in settings.items() for x in ("--set", f"{key}={value}")]
    common = ("--config", "configs/smollm2-demo.yaml", *sets)
    for stage in ("extract/main.py", "train/main.py"):
        run(stage, *common)
    run("eval/main.py", *common, "--mode", "live")
    return folder, common


def greedy_answers(url: str, folder: Path) -> list[list[int]]:
    """vLLM's own greedy answers to the held-out prompts, as token ids."""
    reader = ShardReader(folder / "eval-sets" / "math" / "states")
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    answers = []
    for sample in (reader[i] for i in range(len(reader))):
        body = {"model": model["id"], "prompt": sample.input_ids[: sample.prompt_tokens].tolist(),
                "max_tokens": SETTINGS["eval.max_new_tokens"], "temperature": 0, "return_token_ids": True}  # fmt: skip
        (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()["choices"]
        answers.append(choice["token_ids"])
    return answers


def target_folder() -> Path:
    return Path(unpack_gguf(locate(load_config("configs/smollm2-demo.yaml").target)).source)


@pytest.fixture(scope="module")
def plain(trained: tuple[Path, tuple[str, ...]]) -> list[list[int]]:
    """What vLLM answers without a drafter."""
    folder, _ = trained
    with vllm(target_folder(), None, folder / "plain.log") as url:
        return greedy_answers(url, folder)


@pytest.mark.parametrize("layout", ["native", "speculators"])
def test_vllm_accepts_what_live_decoding_accepts(tmp_path, trained, plain, layout):
    folder, common = trained
    (checkpoint,) = complete_checkpoints(folder)
    target = target_folder()
    server: tuple[Path, Path | None] = (target, checkpoint)
    if layout == "speculators":
        export.write(checkpoint, "speculators", tmp_path / "out", str(target))
        server = (tmp_path / "out", None)
    with vllm(*server, tmp_path / "vllm.log") as url:
        out = run("eval/main.py", *common, "--mode", "served", "--server", url, "--again")
        assert greedy_answers(url, folder) == plain
    live, served = chain(folder, "live"), chain(folder, "served")
    print(out, live, served, sep="\n")
    assert served["prompts"] == live["prompts"] == 12
    assert live["tau"] > 1.5, "the drafter learned too little for this test to see anything"
    for one, other in ((served, live), (live, served)):
        assert one["ci95"][0] <= other["tau"] <= one["ci95"][1]
    near = pytest.approx(served["accept_at_position"], abs=0.08)
    assert live["accept_at_position"] == near
    assert served["tokens_per_second"] > 0
