"""Waiting for another process, never in silence."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from configs.load import UserError

POLL_SECONDS = 0.2
NOTICE_SECONDS = 60.0
PATIENCE_HOURS = 24.0

Made = TypeVar("Made")


class Notice:
    """Says at most once a minute what somebody is waiting for."""

    def __init__(self, *, at_once: bool) -> None:
        self.told = time.monotonic() - (NOTICE_SECONDS if at_once else 0)

    def say(self, text: str) -> None:
        if time.monotonic() - self.told >= NOTICE_SECONDS:
            self.told = time.monotonic()
            print(text, flush=True)


def made_by(rank: int, world: int, what: str, get: Callable[[], Made | None]) -> Made:
    """What process `rank` of `world` makes, as soon as `get` has it. UserError after a day."""
    notice, end = Notice(at_once=False), time.monotonic() + PATIENCE_HOURS * 3600
    while (made := get()) is None:
        if time.monotonic() > end:
            raise UserError(
                f"process {rank} of {world} did not make {what} in {PATIENCE_HOURS:g} hours; start all processes again, "
                "what is finished is kept"
            )
        notice.say(
            f"waiting:  process {rank} of {world} is to make {what}; if it is gone, start it again"
        )
        time.sleep(POLL_SECONDS)
    return made
