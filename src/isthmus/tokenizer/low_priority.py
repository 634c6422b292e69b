"""A thread for long work in native code, which has the cores only when nobody else needs them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from isthmus.config import LONG_TEXT_NICE

T = TypeVar("T")


class LowPriorityThread:
    """One, started when first needed. What runs in it must leave the interpreter's lock: a thread that holds
    it while the scheduler prefers others would hold up everybody."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="low", initializer=_lower_own_priority)

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, for which the caller waits."""
        return self._thread.submit(work).result()


def _lower_own_priority() -> None:
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a system where a thread has no priority of its own
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, own + LONG_TEXT_NICE)  # beyond the lowest is the lowest
