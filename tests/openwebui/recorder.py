"""A forwarder between a client and a server that keeps what passed through it, as it passes.

It changes nothing: a stream's pieces go on as they come, and who leaves is left.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

# Of one connection, or set again by aiohttp for the next one.
_HOP_HEADERS = frozenset({"host", "connection", "content-length", "transfer-encoding"})
_ADDED_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_MAX_BODY_BYTES = 64 << 20


@dataclass
class Exchange:
    """A request and, as far as it has come, its answer."""

    method: str
    path: str
    origin: str  # of the web page that asked; empty for a program
    request: bytes
    status: int = 0  # 0: no answer yet
    content_type: str = ""
    answer: bytearray = field(default_factory=bytearray)
    ended: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """The request's JSON; empty if it has none."""
        return json.loads(self.request) if self.request else {}

    def __str__(self) -> str:
        who = f" from {self.origin}" if self.origin else ""
        return f"{self.method} {self.path}{who}: {self.status} {self.content_type}, {len(self.answer)} bytes"


class Recorder:
    """Forwards what comes to `url` to the server at `target`, both without a path."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        self.url = ""
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Recorder:
        self._thread.start()
        self._listens.wait()
        return self

    def __exit__(self, *unused: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        # Answers of a slow model may take their time; compressed ones are passed on as they are.
        patient = ClientTimeout(total=None)
        async with ClientSession(timeout=patient, auto_decompress=False) as self._session:
            await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=1).start()
            self.url = "http://{}:{}".format(*runner.addresses[0])
            self._listens.set()
            await self._end.wait()
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        origin = request.headers.get("Origin", "")
        seen = Exchange(request.method, request.path_qs, origin, await request.read())
        self.exchanges.append(seen)
        headers = [each for each in request.headers.items() if each[0].lower() not in _HOP_HEADERS]
        async with self._session.request(
            seen.method,
            self._target + seen.path,
            headers=headers,
            data=seen.request or None,
            skip_auto_headers=_ADDED_HEADERS,  # what the client left out stays so
        ) as upstream:
            seen.status, seen.content_type = upstream.status, upstream.content_type
            answer = web.StreamResponse(status=upstream.status)
            for name, value in upstream.headers.items():
                if name.lower() not in _HOP_HEADERS:
                    answer.headers.add(name, value)
            await answer.prepare(request)
            async for piece in upstream.content.iter_any():
                seen.answer += piece
                await answer.write(piece)
            await answer.write_eof()
            seen.ended = True
            return answer
