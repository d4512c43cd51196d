"""The run folder's paperwork: what made it, with which code, in files that a kill cannot tear.

    run_dir = open_run_dir(config, stage="extract", resume=False)
    with FolderLock(run_dir, "extract"):
        ...

With several processes, the main one alone opens and locks the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import weakref
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from configs.credentials import hide_in_command
from configs.load import REPOSITORY, UserError, dump_config
from configs.schema import Config

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "safetensors", "wandb")


def atomic_write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file that is either the old one or the whole new one, whatever happens.

    A killed process may leave `.NAME.tmp-PID-XXXX` beside it. Raises OSError as writing does, with
    path as the file's name.
    """
    data = text.encode()
    # Two nodes that share a disk can have equal process ids, hence the random part.
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):  # only there if something went wrong, Ctrl-C too
            temporary.unlink()
    _fsync_folder(path.parent)


def atomic_write_json(path: Path, obj: object) -> None:
    """Write obj as indented JSON in the manner of atomic_write_text.

    Raises ValueError or TypeError, before any file is touched, for what JSON cannot say (NaN too).
    """
    atomic_write_text(path, json.dumps(obj, indent=2, allow_nan=False) + "\n")


def _fsync_folder(folder: Path) -> None:
    """Make a rename in folder survive a power cut, where the file system can do that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def fingerprint(obj: object) -> str:
    """Return 16 hex digits that depend on obj as JSON, and not on the order of its keys."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes in hex. Raises OSError as reading does."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance(config: Config, command: Sequence[str]) -> dict[str, Any]:
    """Return what is needed to tell, and to repeat, how a result was made.

    Without git, or a repository, `git` is None; a package that is not installed has version None.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "command": shlex.join(hide_in_command(command)),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git_state(REPOSITORY),
        "versions": versions,
        "config_fingerprint": fingerprint(config.model_dump(mode="json")),
    }


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit and dirty flag (of tracked files) of the repository around folder, if any."""
    # In a git hook, GIT_DIR and its kin point at the repository that runs the hook.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": git("status", "--porcelain", "-uno") != ""}
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def open_run_dir(config: Config, *, stage: str, resume: bool) -> Path:
    """Create or reopen config.run_dir, record this command in it and return it.

    config.yaml becomes the current config; provenance.json keeps an entry for every command. What a
    changed config means for the artefacts of earlier stages is for their manifests to decide.

    Raises UserError if the folder cannot be written, or holds other things than a run of ours and
    resume is not given.
    """
    folder = Path(config.run_dir)
    record = folder / "provenance.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Hidden files are ours: a lock may be taken first, a killed write may leave its temporary.
        names = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
        if names and not names & {"config.yaml", "provenance.json"} and not resume:
            raise UserError(
                f"run_dir {folder} is not empty and not a run folder (it holds {min(names)}); "
                "choose another run_dir, or give --resume to use it all the same"
            )
        # eval often starts while train runs, and both read, append and write.
        with FolderLock(folder, "provenance", wait=True):
            runs = _recorded_runs(record)
            entry = {"stage": stage, "resume": resume, **provenance(config, sys.argv)}
            atomic_write_json(record, {"schema": 1, "runs": [*runs, entry]})
            atomic_write_text(folder / "config.yaml", dump_config(config))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write to run_dir {folder}: {why}") from None
    return folder


def _recorded_runs(record: Path) -> list[Any]:
    """Return the entries of provenance.json, none if it does not exist. Raises UserError."""
    try:
        runs = json.loads(record.read_bytes())["runs"]
        if isinstance(runs, list):
            return runs
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        pass  # not JSON, or JSON of another shape
    raise UserError(f"{record} is damaged; move it away and run the same command again")


class LockHeldError(UserError):
    """Another living process holds the lock; `owner` names it."""

    def __init__(self, message: str, owner: str) -> None:
        super().__init__(message)
        self.owner = owner


class FolderLock:
    """Holds `folder/.lock-STAGE` for one process; entering raises LockHeldError when another has it.

    The kernel lets go when the owner ends, however it ends. The file stays behind and means
    nothing: removing it would let two processes hold two files of the same name.
    """

    def __init__(self, folder: Path, stage: str, *, wait: bool = False) -> None:
        self.folder, self.stage, self.wait = folder, stage, wait
        self.handle: int | None = None

    def __enter__(self) -> FolderLock:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / f".lock-{self.stage}", os.O_RDWR | os.O_CREAT, 0o666)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write to {self.folder}: {error}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if self.wait else fcntl.LOCK_NB))
        except BlockingIOError:
            pid = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise LockHeldError(
                f"another {self.stage} process (pid {pid}) is working in {self.folder}; wait for "
                "it to end, or stop it, and run the same command again",
                owner=f"process {pid}",
            ) from None
        except OSError as error:
            # Some cluster file systems are mounted without locks. Working is worth more there.
            print(f"warning: {self.folder} cannot be locked: {error.strerror}", file=sys.stderr)
        self.handle = handle
        _held.add(self)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None
        _held.discard(self)


def lock_owner(folder: Path, stage: str) -> str | None:
    """The process id of whoever holds this lock now, or None. Takes nothing and waits for nobody."""
    try:
        handle = os.open(folder / f".lock-{stage}", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two may look at once
    except BlockingIOError:
        return os.read(handle, 32).decode(errors="replace").strip() or "unknown"
    except OSError:
        return None  # a file system without locks
    finally:
        os.close(handle)
    return None


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _leave_locks_to_parent() -> None:
    """Drop the copies that a fork made: a data loader's worker may outlive the owner."""
    for lock in list(_held):
        lock.__exit__()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


def existing_parent(folder: Path) -> Path:
    """The folder, or the nearest above it that exists: on the disk where it will be."""
    return next(p for p in [folder.absolute(), *folder.absolute().parents] if p.exists())


def free_space_check(folder: Path, needed_bytes: int, what: str) -> None:
    """Check that the disk of folder, which need not exist yet, has room. Raises UserError."""
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < needed_bytes:
        needed, there = (f"{size / 2**30:,.2f} GiB" for size in (needed_bytes, free))
        raise UserError(
            f"{what} needs {needed} and {folder} has {there} free; make room or choose another "
            "run_dir"
        )
