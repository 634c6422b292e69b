"""Streams: frames, and a response that sends them while it watches the client.

The rules of a stream, kept here for every endpoint that has one: a ping goes out when nothing else did for a
while, an error becomes one last frame, the protocol's end (`data: [DONE]`) always comes, and a client that
leaves stops the work at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from isthmus.server.errors import ApiError, ClientGone, anthropic_body, as_api_error
from isthmus.server.generation import Choices

T = TypeVar("T")

# JSON may hold these as they are, but clients that split lines as Python's str.splitlines does (httpx among
# them) would cut a frame in two there. Other line ends of that kind are control characters, always escaped.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def frame(data: dict[str, Any]) -> bytes:
    """One `data:` event. Text stays UTF-8: escaped, most scripts would be two to three times as long."""
    return b"data: " + line(data) + b"\n"


def named_frame(name: str, data: dict[str, Any]) -> bytes:
    """One event with a name, as Anthropic's protocol and OpenAI's responses have them."""
    return f"event: {name}\n".encode() + frame(data)


def line(data: dict[str, Any]) -> bytes:
    """One line of JSON."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"{text.translate(_LINE_ENDS)}\n".encode()


@dataclass(frozen=True)
class Protocol:
    """What a stream of one protocol says beside its frames."""

    media_type: str
    ping: bytes
    done: bytes
    error: Callable[[ApiError], bytes]


OPENAI = Protocol("text/event-stream", b": ping\n\n", b"data: [DONE]\n\n", lambda error: frame(error.body))
ANTHROPIC = Protocol(
    "text/event-stream",
    named_frame("ping", {"type": "ping"}),
    b"",  # `message_stop` or `error` is the end
    lambda error: named_frame("error", anthropic_body(error)),
)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first: ClientGone.

    The request's body must have been read: what `receive` has to say then is only that the client left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends the frames of an iterator. `on_end` is called once, however the stream ends."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        ping_interval_s: float,
        on_end: Callable[[], None],
        protocol: Protocol = OPENAI,
    ) -> None:
        # no-transform, and nginx's header: a proxy that compresses or collects would hold tokens back.
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=protocol.media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._ping_interval_s = ping_interval_s
        self._on_end = on_end
        self._protocol = protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await until_gone(receive, self._send_all(send))
        finally:
            self._on_end()
            await self._frames.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in _with_pings(self._frames, self._ping_interval_s, self._protocol.ping):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            data = self._protocol.error(as_api_error(error))
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": self._protocol.done, "more_body": False})


async def stream_of(
    choices: Choices,
    frames: AsyncGenerator[bytes, None],
    ping_interval_s: float,
    protocol: Protocol = OPENAI,
    *,
    patience_s: float | None = None,
) -> EventStream:
    """The response that streams `frames`, once there is something to stream; it closes `choices`.

    Waits for the first event, so that an error before it has a real status, but no longer than for a ping (or
    `patience_s`).
    """
    try:
        async with asyncio.timeout(ping_interval_s if patience_s is None else patience_s):
            await choices.started()
    except TimeoutError:
        pass  # a long prefill: the stream begins with pings
    except BaseException:
        choices.close()
        raise
    return EventStream(frames, ping_interval_s=ping_interval_s, on_end=choices.close, protocol=protocol)


async def _with_pings(frames: AsyncIterator[bytes], interval_s: float, ping: bytes) -> AsyncIterator[bytes]:
    """The same frames, with a ping wherever none came for `interval_s`."""
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(frames))
            done, _ = await asyncio.wait({pending}, timeout=interval_s)
            if not done:
                yield ping
                continue
            try:
                data = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield data
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
