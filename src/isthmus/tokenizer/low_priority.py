"""A thread for long work in native code, which has the cores only when nobody else needs them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from isthmus.priority import lower_own_priority

T = TypeVar("T")


class LowPriorityThread:
    """One, started when first needed. What runs in it must leave the interpreter's lock: a thread that holds
    it while the scheduler prefers others would hold up everybody."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="low", initializer=lower_own_priority)

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, for which the caller waits."""
        return self._thread.submit(work).result()
