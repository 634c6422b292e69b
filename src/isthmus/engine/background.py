"""Work beside the step loop that may take its time: the disk's."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)


class Worker:
    """Jobs one after the other, in a thread that is there only while there are any.

    Whatever a job waits for, neither who adds one nor the end of the process waits for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_running = False
        self._thread: threading.Thread | None = None
        self._moved_at = 0.0

    def add(self, job: Callable[[], None]) -> None:
        """From any thread. What the job raises is logged."""
        with self._changed:
            self._jobs.append(job)
            if self._is_running:
                return
            self._is_running = True
            self._moved_at = time.monotonic()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def moved(self) -> None:
        """Called by a job of many parts after each."""
        self._moved_at = time.monotonic()

    def is_stuck(self, seconds: float) -> bool:
        """Whether it is at work and has got no further for so long."""
        return self._is_running and time.monotonic() - self._moved_at > seconds

    def drain(self, seconds: float) -> bool:
        """Waits until nothing is left to do, at most so long; whether it came to that."""
        if threading.current_thread() is self._thread:  # what a job let go of may ask for it
            return False
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            self.moved()
            try:
                job()
            except Exception:
                log.exception("%s: a job failed", self._name)
            del job  # it keeps alive what it is about
