"""One request at the engine, as text: tokens in, pieces of text out, stop strings and the end in between.

Tokens become text when they arrive, not when the client reads: a stop string ends the engine's work at once
also for a slow reader, whose unread text waits here joined into one piece (at most a context of it).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Literal

from isthmus.engine.process import EngineProcess
from isthmus.engine.request import Output, Request
from isthmus.errors import EngineError, IsthmusError
from isthmus.tokenizer import Detokenizer

log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length"]


class Generation:
    """Adds `request` to the engine. Whoever makes one calls `close` in the end; `on_end` is called once."""

    def __init__(
        self, engine: EngineProcess, request: Request, detokenizer: Detokenizer, on_end: Callable[[], None]
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.num_prompt_tokens = len(request.prompt)
        self.num_output_tokens = 0
        self.id = request.id
        self._engine = engine
        self._detokenizer = detokenizer
        self._on_end = on_end
        self._unread = ""
        self._ended = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._added_at = time.monotonic()
        self._first_at: float | None = None
        engine.add(request, self._receive)

    async def started(self) -> None:
        """Returns when the first token has come or the answer has ended; raises the error that ended it."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The text as it comes, no piece empty. Raises the error that ended it, after the text before it."""
        ended = False
        while not ended:
            await self._changed.wait()
            self._changed.clear()
            text, self._unread, ended = self._unread, "", self._ended
            if text:
                yield text
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the engine's work on it, if there is any left. Idempotent."""
        if not self._ended:
            self._engine.cancel(self.id)
            self._end("client gone")

    def _receive(self, event: Output | IsthmusError) -> None:
        """What the engine calls. A fault here ends this request alone."""
        try:
            if isinstance(event, IsthmusError):
                raise event
            if event.finish_reason in ("error", "cancelled"):
                raise EngineError(event.error or "the engine gave the request up")
            self._take(event)
        except Exception as error:
            self._error = error
            self._engine.cancel(self.id)
            self._end(f"error: {error}")

    def _take(self, event: Output) -> None:
        self.num_output_tokens = event.num_output_tokens
        if self._first_at is None:
            self._first_at = time.monotonic()
        if event.token is not None:
            self._unread += self._detokenizer.push(event.token)
        if self._detokenizer.stopped is not None:
            self.finish_reason = "stop"
            if event.finish_reason is None:
                self._engine.cancel(self.id)
        elif event.finish_reason is not None:
            self.finish_reason = "length" if event.finish_reason == "length" else "stop"
            self._unread += self._detokenizer.finish()
        if self.finish_reason is not None:
            self._end(self.finish_reason)
        self._changed.set()

    def _end(self, how: str) -> None:
        self._ended = True
        self._changed.set()
        self._on_end()
        log.info("%s: %d prompt tokens, %s, %s", self.id, self.num_prompt_tokens, self._speed(), how)

    def _speed(self) -> str:
        now = time.monotonic()
        if self._first_at is None:
            return f"no token in {now - self._added_at:.2f} s"
        text = f"first token after {self._first_at - self._added_at:.2f} s, {self.num_output_tokens} in all"
        if self.num_output_tokens > 1 and now > self._first_at:
            text += f" at {(self.num_output_tokens - 1) / (now - self._first_at):.1f} tok/s"
        return text
