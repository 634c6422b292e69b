"""Threads and processes that have the cores only when nobody else needs them."""

from __future__ import annotations

import contextlib
import os
import threading

from isthmus.config import LOW_PRIORITY_NICE


def lower_own_priority() -> None:
    """Of the calling thread.

    What runs in it must leave the interpreter's lock: a thread that holds it while the scheduler prefers
    others would hold up everybody.
    """
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a system where a thread has no priority of its own
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, own + LOW_PRIORITY_NICE)  # beyond the lowest is the lowest
