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


def take_only_idle_cores() -> None:
    """Of the calling thread, and of what it starts: it runs where nobody else would, and may not run at all.

    For a process that shares no lock with others. There is no way back. Where a system has no such policy,
    nothing changes.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
