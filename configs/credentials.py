"""What is, or may well be, a credential: by its name, by its look, by the environment. None is written down or shown."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_NAME = re.compile(r"(key|token|secret|passwd|password|credentials?)$", re.IGNORECASE)
_VALUE = re.compile(
    r"\b(hf_|sk-|ghp_|github_pat_)[\w-]{16,}"  # tokens that can be told by their start
    r"|(?<=://)[^/@\s]+(?=@)"  # https://user:password@host
    r"|(?<=[Bb]earer )\S+"
)
HIDDEN = "[hidden]"


def hide(text: str) -> str:
    """The text without tokens, passwords in addresses, and the secrets of the environment."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _NAME.search(name):
            text = text.replace(value, HIDDEN)
    return _VALUE.sub(HIDDEN, text)


def holds_credential(text: str) -> bool:
    return hide(text) != text


def hide_in_command(command: Sequence[str]) -> list[str]:
    """A command to be recorded. Arguments too are judged by their names.

    By the end of a name, so that --api-key and HF_TOKEN are hidden and max_new_tokens and mask_token_id are not.
    """
    shown: list[str] = []
    hide_next = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        named = _NAME.search(name) is not None
        text = f"{name}={HIDDEN}" if named and equals else argument
        if hide_next and not argument.startswith("--"):
            text = HIDDEN
        shown.append(hide(text))
        hide_next = named and not equals and name.startswith("-")
    return shown
