"""A lock that is given in the order in which it was asked for.

threading's goes to whoever asks first after it was given back, which is nearly always the thread that gave it
back: one that runs step after step would keep all others out.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A context that one thread at a time is in."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of what follows, for some instructions
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        turn = threading.Lock()
        turn.acquire()
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C: who no longer waits must not be given it, or passes it on
            with self._guard:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._pass_on()
            raise

    def __exit__(self, *error: object) -> None:
        self.leave()

    def enter_if_free(self) -> bool:
        """Never waits, so it may be called from a finaliser, which Python runs in the middle of anything."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            free, self._taken = not self._taken, True
            return free
        finally:
            self._guard.release()

    def leave(self) -> None:
        with self._guard:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._taken = False
