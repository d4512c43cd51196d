"""The run folder's paperwork, with real kills, real locks and real repositories."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configs.provenance as module
from configs.load import REPOSITORY, UserError, load_config
from configs.provenance import (
    FolderLock,
    atomic_write_json,
    atomic_write_text,
    file_sha256,
    fingerprint,
    free_space_check,
    open_run_dir,
    provenance,
)
from configs.schema import Config


def make_config(run_dir: Path | str, **fields: Any) -> Config:
    data = {"run_dir": str(run_dir), "target": {"path": "m"}, "data": {"prompts": ["a"]}, **fields}
    return Config.model_validate_json(json.dumps(data))


@contextlib.contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A child that has printed its first line; killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


# Atomic writes


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    atomic_write_text(path, "old, and longer")
    atomic_write_text(path, "nëw\n")
    assert path.read_bytes() == "nëw\n".encode()
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask  # as readable as any other file
    atomic_write_json(tmp_path / "x.json", {"b": [1, "ü"], "a": None})
    assert json.loads((tmp_path / "x.json").read_text()) == {"b": [1, "ü"], "a": None}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file_and_removes_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: str
) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")

    def fail(*_: object) -> None:
        (temporary,) = set(tmp_path.iterdir()) - {path}
        assert re.fullmatch(rf"\.x\.txt\.tmp-{os.getpid()}-[0-9a-f]+", temporary.name)
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)) as caught:
        atomic_write_text(path, "new")
    monkeypatch.undo()
    if isinstance(caught.value, OSError):
        assert caught.value.filename == str(path)  # what main_guard will name
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_data_reaches_the_disk_before_its_name_and_then_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(handle: int) -> None:
        target = Path(f"/proc/self/fd/{handle}").readlink()
        if target != tmp_path:
            assert target.read_text() == "new"  # flushed before it is synced
        calls.append("sync folder" if target == tmp_path else "sync file")
        fsync(handle)

    def spy_replace(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    atomic_write_text(tmp_path / "x.txt", "new")
    assert calls == ["sync file", "rename", "sync folder"]


def test_what_json_cannot_say_touches_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    for obj in [{"a": float("nan")}, {"a": object()}]:
        with pytest.raises((ValueError, TypeError)):
            atomic_write_json(path, obj)
    assert path.read_text() == "old"
    with pytest.raises(FileNotFoundError):
        atomic_write_text(tmp_path / "none" / "x", "new")
    with pytest.raises(NotADirectoryError):
        atomic_write_text(path / "x", "new")


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    size = 2_000_000
    code = """
import itertools, os, sys
from pathlib import Path
from configs.provenance import atomic_write_text
os.fsync = lambda handle: None  # for power cuts; here it would leave hardly a moment for the rest
path = Path(sys.argv[1])
atomic_write_text(path, "a" * int(sys.argv[2]))
print("ready", flush=True)
for letter in itertools.cycle("bcdefgh"):
    atomic_write_text(path, letter * int(sys.argv[2]))
"""
    moments = random.Random(0)
    for _ in range(3):
        with python(code, path, size) as child:
            # What a reader sees at some moment is what a kill would have left.
            texts = []
            for _ in range(60):
                time.sleep(moments.uniform(0, 0.005))
                texts.append(path.read_text())
            child.send_signal(signal.SIGKILL)
            child.wait()
        for text in [*texts, path.read_text()]:
            assert text == text[:1] * size
        assert len(set(texts)) > 1  # the child was writing all the while
    leftovers = {p.name for p in tmp_path.iterdir()} - {"x.txt"}
    assert all(re.fullmatch(r"\.x\.txt\.tmp-\d+-[0-9a-f]+", name) for name in leftovers)


# Fingerprints


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def reordered(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {key: reordered(obj[key]) for key in reversed(obj)}
    return [reordered(item) for item in obj] if isinstance(obj, list) else obj


@settings(deadline=None, database=None, max_examples=60)
@given(JSON, JSON)
def test_a_fingerprint_depends_on_the_value_alone(a: Any, b: Any) -> None:
    assert re.fullmatch("[0-9a-f]{16}", fingerprint(a))
    assert fingerprint(reordered(a)) == fingerprint(a)
    same = json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    assert (fingerprint(a) == fingerprint(b)) == same


def test_a_fingerprint_is_the_sha256_of_canonical_json() -> None:
    text = rb'{"a":"\u00fc","b":[1,2.5]}'
    digest = subprocess.run(["sha256sum"], input=text, capture_output=True, check=True).stdout
    assert fingerprint({"b": [1, 2.5], "a": "ü"}) == digest[:16].decode()


def test_file_sha256_is_that_of_sha256sum(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(os.urandom((1 << 20) + 7))  # more than a block
    assert file_sha256(path) == subprocess.check_output(["sha256sum", path], text=True).split()[0]


# Provenance


SECRET = "s3cr3t-value-0123456789"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", SECRET],
        [f"--api-key={SECRET}"],
        ["--hf-token", SECRET],
        ["--password", SECRET],
        ["--set", f"served.api_key={SECRET}"],
        [f"HF_TOKEN={SECRET}"],
        [f"AWS_SECRET_ACCESS_KEY={SECRET}"],
        ["--model", f"hf_{SECRET}"],
        ["--url", f"https://me:{SECRET}@host/v1"],
        ["--header", f"Authorization: Bearer {SECRET}"],
    ],
)
def test_secrets_on_the_command_line_are_hidden(arguments: list[str]) -> None:
    command = ["eval/main.py", *arguments, "--mode", "served"]
    shown = provenance(make_config("r"), command)["command"]
    assert SECRET not in shown
    assert "[hidden]" in shown
    assert shown.startswith("eval/main.py ")
    assert shown.endswith(" --mode served")


def test_secrets_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "a")  # hiding every "a" would hide everything
    record = provenance(make_config("r"), ["main.py", "--weird", f"x{SECRET}y", "data"])
    assert record["command"] == "main.py --weird 'x[hidden]y' data"
    assert SECRET not in json.dumps(record)


def test_settings_that_sound_like_secrets_are_shown() -> None:
    command = [
        "train/main.py",
        *("--config", "my config.yaml"),
        *("--set", "data.max_new_tokens=5"),
        *("--set", "drafter.mask_token_id=7"),
        *("--set", "target.revision=0123456789abcdef0123456789abcdef01234567"),
        *("--use-token", "--resume"),
    ]
    shown = provenance(make_config("r"), command)["command"]
    assert "hidden" not in shown
    assert "'my config.yaml'" in shown  # can be pasted into a shell


def test_provenance_says_when_with_what_and_not_where() -> None:
    config = make_config("r")
    record = provenance(config, ["main.py"])
    age = datetime.now(UTC) - datetime.fromisoformat(record["time"])
    assert timedelta(0) <= age < timedelta(minutes=1)
    assert record["time"].endswith("+00:00")
    versions = record["versions"]
    assert set(versions) == {"python", *module.PACKAGES}
    assert versions["python"] == sys.version.split()[0]
    assert record["config_fingerprint"] == fingerprint(config.model_dump(mode="json"))
    assert record["config_fingerprint"] != provenance(make_config("s"), [])["config_fingerprint"]
    assert os.uname().nodename not in json.dumps(record)


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("pydantic", "no-such-package-here"))
    versions = provenance(make_config("r"), [])["versions"]
    assert versions["no-such-package-here"] is None
    assert versions["pydantic"] == pydantic.VERSION


def test_git_commit_and_dirty_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPOSITORY", tmp_path)

    def git_state() -> Any:
        return provenance(make_config("r"), [])["git"]

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.check_output(["git", *identity, *arguments], cwd=tmp_path, text=True)

    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state() is None  # no repository
    git("init", "-q")
    assert git_state() is None  # no commit yet
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x").touch()  # untracked output is not a change of the code
    assert git_state() == {"commit": commit, "dirty": False}
    (tmp_path / "code.py").write_text("22")
    assert git_state() == {"commit": commit, "dirty": True}
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as inside a git hook
    assert git_state() == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() is None  # no git


# The run folder


def runs(folder: Path) -> list[dict[str, Any]]:
    record = json.loads((folder / "provenance.json").read_text())
    assert record["schema"] == 1
    entries: list[dict[str, Any]] = record["runs"]
    return entries


def test_a_run_folder_keeps_every_command_and_the_current_config(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    first = make_config(folder)
    assert open_run_dir(first, stage="extract", resume=False) == folder
    assert load_config(folder / "config.yaml") == first
    second = make_config(folder, seed=3)
    open_run_dir(second, stage="train", resume=True)
    assert load_config(folder / "config.yaml") == second
    entries = runs(folder)
    assert [(e["stage"], e["resume"]) for e in entries] == [("extract", False), ("train", True)]
    assert [e["config_fingerprint"] for e in entries] == [
        fingerprint(config.model_dump(mode="json")) for config in (first, second)
    ]
    assert all({"command", "time", "git", "versions"} <= set(e) for e in entries)


def test_a_folder_with_other_things_is_refused_unless_resumed(tmp_path: Path) -> None:
    (tmp_path / ".hidden").touch()
    open_run_dir(make_config(tmp_path), stage="extract", resume=False)  # hidden files do not count
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"thesis\.tex"):
        open_run_dir(make_config(other), stage="extract", resume=False)
    assert {p.name for p in other.iterdir()} == {"thesis.tex"}
    open_run_dir(make_config(other), stage="extract", resume=True)
    open_run_dir(make_config(other), stage="train", resume=False)  # now it is ours


def test_a_kill_between_the_two_files_is_harmless(tmp_path: Path) -> None:
    for survivor in ("config.yaml", "provenance.json"):
        folder = tmp_path / survivor
        open_run_dir(make_config(folder), stage="extract", resume=False)
        open_run_dir(make_config(folder), stage="extract", resume=False)
        for name in {"config.yaml", "provenance.json"} - {survivor}:
            (folder / name).unlink()
        open_run_dir(make_config(folder), stage="train", resume=False)
        assert len(runs(folder)) == (3 if survivor == "provenance.json" else 1)
        assert (folder / "config.yaml").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"runs": 3}', b"{}", b"\xff\xfe"])
def test_a_damaged_record_is_named_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "provenance.json").write_bytes(content)
    with pytest.raises(UserError, match=r"provenance\.json is damaged"):
        open_run_dir(make_config(tmp_path), stage="train", resume=True)
    assert (tmp_path / "provenance.json").read_bytes() == content


@pytest.mark.parametrize("make", [str, lambda p: f"{p}/below", lambda p: f"{p}\0"])
def test_a_place_that_cannot_be_a_folder_is_refused(
    tmp_path: Path, make: Callable[[Path], str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    config = make_config(make(file))
    with pytest.raises(UserError, match="cannot write to run_dir"):
        open_run_dir(config, stage="train", resume=False)
    with pytest.raises(UserError, match="cannot write to"):
        FolderLock(Path(config.run_dir), "train").__enter__()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that root cannot write")
def test_a_folder_without_write_permission_is_refused() -> None:
    with pytest.raises(UserError, match=r"^cannot write to run_dir /proc/self/new: "):
        open_run_dir(make_config("/proc/self/new"), stage="train", resume=False)


def test_two_commands_at_once_are_both_recorded(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    stages = [f"stage{i}" for i in range(8)]
    threads = [
        threading.Thread(target=open_run_dir, args=[config], kwargs={"stage": s, "resume": False})
        for s in stages
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry["stage"] for entry in runs(tmp_path)) == stages
    assert load_config(tmp_path / "config.yaml") == config


# Locks


HOLD = """
import os, sys, time
from pathlib import Path
from configs.provenance import FolderLock
with FolderLock(Path(sys.argv[1]), "train"):
    if sys.argv[2] == "fork" and os.fork() == 0:
        Path(sys.argv[1], "child").write_text(str(os.getpid()))
        time.sleep(60)
        os._exit(0)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    with python(HOLD, tmp_path, "alone") as holder:
        with pytest.raises(UserError) as caught, FolderLock(tmp_path, "train"):
            pass
        assert str(tmp_path) in str(caught.value)
        assert f"(pid {holder.pid})" in str(caught.value)
        with FolderLock(tmp_path, "eval"):
            pass  # another stage
        holder.kill()
        holder.wait()
        with FolderLock(tmp_path, "train"):
            assert (tmp_path / ".lock-train").read_text() == f"{os.getpid()}\n"


def test_a_forked_worker_does_not_keep_the_lock_of_a_dead_owner(tmp_path: Path) -> None:
    with python(HOLD, tmp_path, "fork") as holder:
        deadline = time.monotonic() + 10
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker = int((tmp_path / "child").read_text())
        try:
            with pytest.raises(UserError), FolderLock(tmp_path, "train"):
                pass  # the worker's start has not unlocked it
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # still there
            with FolderLock(tmp_path, "train"):
                pass
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_lock_ends_with_its_block_also_when_that_fails(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with pytest.raises(ZeroDivisionError), FolderLock(folder, "train"):
        with pytest.raises(UserError), FolderLock(folder, "train"):
            pass  # the same process counts too
        raise ZeroDivisionError
    with FolderLock(folder, "train"):
        pass


def test_a_file_system_without_locks_is_worth_a_warning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with FolderLock(tmp_path, "train"):
        pass
    assert "cannot be locked: Function not implemented" in capsys.readouterr().err


# Room on the disk


def test_free_space(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    free_space_check(folder, 1, "this")
    free_space_check(folder, shutil.disk_usage(tmp_path).free // 2, "this")
    with pytest.raises(UserError) as caught:
        free_space_check(folder, 5 << 60, "extraction")
    message = str(caught.value)
    assert message.startswith(f"extraction needs 5,368,709,120.00 GiB and {folder} has ")
    there = float(re.findall(r"has ([\d,.]+) GiB free", message)[0].replace(",", ""))
    assert there == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, rel=0.05)
    assert not folder.exists()
