"""The files of vLLM's hidden-states connector (ExampleHiddenStatesConnector, vLLM 0.32).

One safetensors file a request, named after it, in the folder that the server was given:

    token_ids      int64 [T]         the prompt
    hidden_states  [T, L, hidden]    in the model's dtype; L layers, by id from the first to the last

The answer to the request names the file. Its writer may still be at work then: it holds an exclusive flock on `NAME.lock`
until the file is whole.
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.load import UserError

FOLDER = ".vllm"  # in the run folder; hidden, because the server may be the first to make it
PATIENCE = 600.0  # seconds for a file that is being written


class LostFileError(UserError):
    """The file that a completion names is not there or torn."""


def named_file(completion: dict[str, Any], folder: Path) -> Path | None:
    """The file of this completion. The server says where it lies on its machine; only the name counts here."""
    path = (completion.get("kv_transfer_params") or {}).get("hidden_states_path")
    return folder / Path(path).name if path else None


def read_states(file: Path, what: str) -> tuple[Tensor, Tensor]:
    """(token_ids, hidden_states), once the server has written all of it. UserError, about `what`, when it does not.

    LostFileError, which is one, when the file is not there or torn.
    """
    _wait(file, what)
    try:
        with safe_open(file, framework="pt") as f:
            return f.get_tensor("token_ids"), f.get_tensor("hidden_states")
    except (SafetensorError, OSError) as error:
        raise LostFileError(
            f"vLLM's states of {what} cannot be read ({error}); look for the reason in the server's log, and see "
            f"that its disk and {file.parent} are the same and not full"
        ) from None


def discard(file: Path, what: str) -> None:
    """Delete a file, which nobody needs, when it is written."""
    _wait(file, what)
    for path in (file, _lock(file)):
        path.unlink(missing_ok=True)


def _lock(file: Path) -> Path:
    return file.with_name(file.name + ".lock")


def _wait(file: Path, what: str) -> None:
    end = time.monotonic() + PATIENCE
    try:
        with _lock(file).open() as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise UserError(
                            f"vLLM did not finish its states of {what} ({file.name}) within {PATIENCE:.0f} s; "
                            "restart it and run the same command again"
                        ) from None
                    time.sleep(0.005)
    except FileNotFoundError:
        if not file.exists():
            raise LostFileError(
                f"vLLM says it stored states of {what} as {file.name}, but {file.parent} does not have it; start "
                "the server with the command that --vllm-command prints, on a machine that shares this folder"
            ) from None
