"""Ctrl-C while an answer is written: a request to stop, not an exception in the middle of a step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Interrupt:
    """A context in which SIGINT sets `requested`; with `insist` a second one raises KeyboardInterrupt."""

    def __init__(self, *, insist: bool) -> None:
        self.requested = False
        self._insist = insist
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and self._insist:
            raise KeyboardInterrupt
        self.requested = True
