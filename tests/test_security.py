"""Nothing runs code that nobody asked for, leaves its folder, or writes a secret down."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from configs.load import UserError, load_config, main_guard
from configs.schema import TargetConfig
from extract.locate import load_tokenizer, locate, warn_of_remote_code
from extract.vllm_files import named_file
from tests.conftest import write_config
from tests.test_pipeline import copy_run, extracted, run
from train.layout import read_tensors

__all__ = ["extracted"]  # a fixture
ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("configs", "extract", "train", "eval", "launch", "bench")
TOKEN, KEY = "hf_" + "Zq3" * 8, "7f" * 20


def calls(name: str) -> list[tuple[str, ast.Call]]:
    """Every call of `name` or `x.name` in the rooms."""
    found = []
    for file in (file for room in ROOMS for file in (ROOT / room).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                found.append((f"{file.name}:{node.lineno}", node))
    return found


def test_nothing_is_unpickled() -> None:
    loads = calls("torch.load")
    assert loads
    for where, call in loads:
        options = {k.arg: ast.unparse(k.value) for k in call.keywords}
        assert options.get("weights_only") == "True", where
    for name in ("pickle.load", "pickle.loads", "eval", "exec", "os.system", "yaml.load"):
        # the YAML loader is a safe one of ours, see configs/load.py
        found = [where for where, call in calls(name) if "Loader" not in ast.unparse(call)]
        assert not found, name


@pytest.mark.parametrize(
    "where", ["tracking.name", "tracking.entity", "target.path", "data.prompts"]
)
@pytest.mark.parametrize("secret", [TOKEN, KEY, f"https://me:{KEY}@host/x"])
def test_a_credential_in_a_config_is_refused_and_not_repeated(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], where: str, secret: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    file = write_config(tmp_path / "c.yaml", tiny_target)
    value = f"[{secret}]" if where == "data.prompts" else secret
    code = main_guard(lambda _: bool(load_config(file, [f"{where}={value}"])))
    said = capsys.readouterr().err
    assert code == 2 and f"{where} holds a credential" in said and "WANDB_API_KEY" in said
    assert main_guard(lambda _: bool(load_config(file, [f"tracking.nam={secret}"]))) == 2
    said += capsys.readouterr().err
    assert TOKEN not in said and KEY not in said


@pytest.mark.slow
def test_a_run_writes_no_secret_down(extracted: Path, tmp_path: Path) -> None:
    """Config, provenance, log, card, checkpoint and wandb's own files; and what is printed."""
    config = copy_run(extracted, tmp_path, max_steps=1, batch_size=8)
    out = run(
        "train/main.py", "--config", str(config), "--set", "tracking.wandb=offline",
        HF_TOKEN=TOKEN, WANDB_API_KEY=KEY, WANDB_MODE="offline",
    )  # fmt: skip
    files = [file for file in Path(load_config(config).run_dir).rglob("*") if file.is_file()]
    assert any(file.suffix == ".wandb" for file in files) and any(
        f.name == "README.md" for f in files
    )
    for text in (out.encode(), *(file.read_bytes() for file in files)):
        assert TOKEN.encode() not in text and KEY.encode() not in text


def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(3)}, tmp_path / "outside.safetensors")
    (folder := tmp_path / "drafter").mkdir()
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "..", "a/../b"):
        index = {"weight_map": {"norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="is not a file of that folder"):
            read_tensors(folder)


def test_a_server_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    for path in ("/etc/passwd", "../../etc/passwd"):
        said = {"kv_transfer_params": {"hidden_states_path": path}}
        assert named_file(said, tmp_path) == tmp_path / "passwd"


def test_the_lock_is_of_the_pinned_versions() -> None:
    """`make lock` after a change of constraints.txt. torch is whatever build the machine chose."""
    pins = {
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith(("#", "torch=="))
    }
    lock = (ROOT / "requirements.lock").read_text()
    entries = [line.split() for line in lock.replace(" \\\n", " ").splitlines()]

    def plain(pin: str) -> str:
        return pin.lower().replace("_", "-")

    assert {plain(entry[0]) for entry in entries} == {plain(pin) for pin in pins}
    assert all(
        entry[1:] and all(h.startswith("--hash=sha256:") for h in entry[1:]) for entry in entries
    )
    assert "index-url" not in lock and "://" not in lock


CODE = """
import json, sys
from extract.locate import locate
from configs.schema import TargetConfig
for _ in range(3):
    locate(TargetConfig(path=sys.argv[1], trust_remote_code=True))
locate(TargetConfig(path=sys.argv[1]))
"""


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_remote_code_is_announced_before_it_can_run(tmp_path: Path, rank: str, times: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], text=True, capture_output=True, cwd=ROOT,
        env={"PATH": "", "RANK": rank},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"code that comes with {tmp_path} runs here") == times


def test_a_models_code_does_not_run_unasked(tiny_target: Path, tmp_path: Path) -> None:
    """A config.json that points at a module beside it."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "odd", "auto_map": {"AutoConfig": "odd.OddConfig", "AutoTokenizer": ["odd.T", None]}})
    )  # fmt: skip
    (tmp_path / "odd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = TargetConfig(path=str(tmp_path))
    with pytest.raises(UserError, match="cannot load"):
        load_tokenizer(config, locate(config))
    assert not (tmp_path / "ran").exists()


def test_a_chat_template_runs_in_a_sandbox(tiny_target: Path, tmp_path: Path) -> None:
    """It comes with the model, like its weights, and is a program."""
    from jinja2.exceptions import SecurityError

    template = tmp_path / "evil.jinja"
    template.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    config = TargetConfig(path=str(tiny_target), chat_template_file=str(template))
    tokenizer = load_tokenizer(config, locate(config))
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


def test_the_warning_is_of_one_source_each(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_remote_code.cache_clear()
    for source in ("org/a", "org/b", "org/a"):
        warn_of_remote_code(source)
    assert capsys.readouterr().err.count("warning:") == 2
