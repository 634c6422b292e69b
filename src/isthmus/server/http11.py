"""uvicorn's HTTP/1.1 with a limit on the time that a client may take, and errors in the shape of the others.

Without the limit a client that sends a byte now and then keeps its connection, and a file descriptor, for
ever. The time of a body that is read is limited there (body.py).
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from isthmus.server.errors import ApiError

_HEADERS_S = 30.0


class Http11(H11Protocol):
    headers_s = _HEADERS_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        was_early = self._is_answered_early
        super().data_received(data)
        if was_early and not self._is_answered_early:
            self._stop()  # the next request has a time of its own
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answered_early:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP, in the shape of the request's protocol if it got as far as its path.

        Where an answer was begun already it only ends the connection: there is no place for another.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            is_known = self.conn.our_state is h11.SEND_RESPONSE
            path = self.scope["path"] if is_known else ""
            body = bytes(ApiError(400, msg, code="invalid_http").response(path).body)
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            head = h11.Response(status_code=400, headers=headers, reason="Bad Request")
            data = b"" if is_known and self.scope["method"] == "HEAD" else body
            for event in (head, h11.Data(data=data), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if is_known:  # the application gives an answer of its own, which h11 would not take any more
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: an Upgrade that is not taken is answered as if it were not there, as RFC 9110 has it."""

    @property
    def _is_answered_early(self) -> bool:
        """Whether an answer was sent and the request's body goes on, which nobody reads."""
        answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        return answered and self.conn.their_state is h11.SEND_BODY

    def _watch(self) -> None:
        """The time runs from a request's first byte (or the connection) to the end of its headers.

        And from an early answer to the end of the body.
        """
        if self.conn.their_state is not h11.IDLE and not self._is_answered_early:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.headers_s, self._expire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_answered_early:
            self.transport.close()
        elif self.conn.their_state is h11.IDLE:
            self.send_400_response(f"The request's headers were not complete after {self.headers_s:g} s.")
