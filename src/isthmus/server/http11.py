"""uvicorn's HTTP/1.1 with a limit on the time that a request's headers may take.

Without it a client that sends a byte now and then keeps its connection, and a file descriptor, for ever. The
body's time is limited where it is read (body.py).
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_HEADERS_S = 30.0


class Http11(H11Protocol):
    headers_s = _HEADERS_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        """The time runs from a request's first byte (or the connection) to the end of its headers."""
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.headers_s, self._expire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.send_400_response(f"The request's headers were not complete after {self.headers_s:g} s.")
