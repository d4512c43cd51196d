"""The signals that end a training run."""

from __future__ import annotations

import signal
from typing import Any


class StopSignal:
    """SIGTERM and Ctrl-C end the run after the step at hand, with a checkpoint. A second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.number = 0
        signal.signal(signal.SIGTERM, self._set)
        signal.signal(signal.SIGINT, self._set)

    def _set(self, number: int, _frame: Any) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    @property
    def requested(self) -> float:
        return float(self.number > 0)

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number else "another process's signal"
