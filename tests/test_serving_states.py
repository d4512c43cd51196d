"""A real vLLM, started by the command that we print, gives the states of our own forward."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from extract.main import main
from extract.shards import ShardReader
from tests.conftest import make_target, write_config

pytestmark = [pytest.mark.serving, pytest.mark.slow]


def start(printed: str, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The printed command, with the interpreter and a port of this test's choice, and off a GPU its connector."""
    _, _, model, *options = shlex.split(printed)
    if not torch.cuda.is_available():
        transfer = json.loads(options[-1])
        transfer |= {
            "kv_connector": "CpuHiddenStates",
            "kv_connector_module_path": "cpu_hidden_states",
        }
        options[-1] = json.dumps(transfer)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")
    serve = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    serve += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    kept = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    with log.open("wb") as out:
        server = subprocess.Popen(serve, stdout=out, stderr=out, env={**os.environ, **kept})
    return server, f"http://127.0.0.1:{port}"


def wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    pytest.fail(f"vLLM did not start in ten minutes: {log.read_text()[-3000:]}")


def close(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(ours, theirs, strict=True)
    )


def test_states_from_vllm_are_ours(tmp_path, capsys):
    """The last block is tapped and the final state kept, so every kind of layer is there."""
    target = make_target(tmp_path / "target", head_dim=32, tie_word_embeddings=True)
    same: dict[str, Any] = {
        "drafter": {"target_layer_ids": [1, 3, 5]},
        "extract": {"store_last_hidden": True, "shard_tokens": 200},
    }
    folders = {name: tmp_path / name for name in ("hf", "vllm")}
    configs = {}
    for name, folder in folders.items():
        folder.mkdir()
        configs[name] = str(write_config(folder / "c.yaml", target, **same))
    backend = ["--config", configs["vllm"], "--set", "extract.backend=vllm"]
    main([*backend, "--vllm-command"])
    log = tmp_path / "vllm.log"
    server, url = start(capsys.readouterr().out.splitlines()[-1], log)
    try:
        wait(server, url, log)
        main([*backend, "--server", url])
        main(["--config", configs["hf"]])
    finally:
        server.terminate()
        server.wait(60)
    for place in ("states", "eval-sets/held/states"):
        ours, theirs = (ShardReader(folder / "run" / place) for folder in folders.values())
        assert ours.ids == theirs.ids and len(ours) > 2
        assert ours.manifest.target == theirs.manifest.target
        same_answers = [
            i
            for i in range(len(ours))
            if ours[i].input_ids.tolist() == theirs[i].input_ids.tolist()
        ]
        assert len(same_answers) > len(ours) / 2  # greedy near-ties may fall otherwise
        for i in same_answers:
            a, b = ours[i], theirs[i]
            states = [
                [s.hidden_states, *([] if s.last_hidden is None else [s.last_hidden])]
                for s in (a, b)
            ]
            assert close(*states), a.id
