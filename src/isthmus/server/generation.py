"""One request at the engine, as an answer: tokens in, events and at last a reason out.

Tokens become text when they arrive, not when the client reads: a stop string ends the engine's work at once
also for a slow reader, whose unread events wait here joined (at most a context of them).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from isthmus.engine.process import EngineProcess
from isthmus.engine.request import Output, Request, SlotStats, TokenLogprob
from isthmus.errors import EngineError, IsthmusError
from isthmus.server.events import Event, Parser, PlainParser, Reasoning, ToolCall, ToolCallBroken, joined
from isthmus.server.logprobs import ShownToken, TokenTexts
from isthmus.server.metrics import Metrics
from isthmus.server.timing import Timing
from isthmus.tokenizer import Detokenizer

log = logging.getLogger(__name__)

# The engine tells of itself a few times a second.
_PROGRESS_INTERVAL_S = 0.2

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass
class Piece:
    """What came since the last one. The piece with a finish_reason is the last of its choice."""

    index: int  # of the choice
    events: list[Event] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)  # if log-probabilities were asked for
    finish_reason: FinishReason | None = None


class Generation:
    """Adds `request` to the engine. Whoever makes one calls `close` in the end; `on_end` is called once."""

    def __init__(
        self,
        engine: EngineProcess,
        request: Request,
        detokenizer: Detokenizer,
        *,
        parser: Parser | None = None,
        texts: TokenTexts | None = None,
        metrics: Metrics | None = None,
        changed: asyncio.Event | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is set whenever `take` or `error` has something new; several may share one.

        `texts`: if the tokens are wanted beside the events.
        """
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.prompt = request.prompt
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.timing = Timing()
        self.timing.num_prompt_tokens = len(request.prompt)
        self.id = request.id
        self._engine = engine
        self._detokenizer = detokenizer
        self._parser = parser or PlainParser()
        self._texts = texts
        self._metrics = metrics
        self._on_end = on_end
        self._unread: list[Event] = []
        self._unread_tokens: list[ShownToken] = []
        self._num_characters = 0
        self._num_calls = 0
        self.num_reasoning_tokens = 0  # those that brought a thought: text held back counts late
        self._ended = False
        self._changed = changed or asyncio.Event()
        engine.add(request, self._receive)

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._detokenizer.stopped

    def take(self) -> tuple[list[Event], list[ShownToken]]:
        """What came since the last call. Tokens without text wait for those that complete a character."""
        events, self._unread = self._unread, []
        if not events and not self._ended:
            return [], []
        tokens, self._unread_tokens = self._unread_tokens, []
        return events, tokens

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
            self.error = error
            self._engine.cancel(self.id)
            self._end(f"error: {error}")

    def _take(self, event: Output) -> None:
        self._measure(event)
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        text = self._detokenizer.push(event.token) if event.token is not None else ""
        if event.token is not None and self._texts is not None:
            self._texts.push(event.token, event.logprob)
        reason: FinishReason | None = None
        if self._detokenizer.stopped is not None:
            reason = "stop"
            if event.finish_reason is None:
                self._engine.cancel(self.id)
        elif event.finish_reason is not None:
            reason = "length" if event.finish_reason == "length" else "stop"
            text += self._detokenizer.finish()
        self._parse(text, last=reason is not None)
        if reason is not None:
            self.finish_reason = "tool_calls" if self._num_calls and reason == "stop" else reason
            self._end(self.finish_reason)
        self._changed.set()

    def _parse(self, text: str, *, last: bool) -> None:
        events = [*self._parser.push(text), *(self._parser.finish() if last else ())]
        if events and isinstance(events[0], Reasoning):
            self.num_reasoning_tokens += 1
        self._num_calls += sum(isinstance(event, ToolCall) for event in events)
        self._num_calls -= sum(isinstance(event, ToolCallBroken) for event in events)
        self._unread = joined([*self._unread, *events])
        self._num_characters += len(text)
        if self._texts is not None:
            take = self._texts.finish if last else self._texts.take
            self._unread_tokens += take(self._num_characters)

    def _measure(self, event: Output) -> None:
        timing = self.timing
        timing.num_output_tokens = event.num_output_tokens
        timing.num_cached_tokens = event.num_cached_tokens
        gap_s = timing.came()
        if self._metrics is not None and event.token is not None:
            self._metrics.token_came(timing, gap_s)

    def _end(self, how: str) -> None:
        self._ended = True
        self._changed.set()
        if self._metrics is not None:
            self._metrics.request_ended(self.timing, self.finish_reason or how.partition(":")[0])
        log.info("%s: %s, %s", self.id, self.timing.line(), how)
        self._on_end()


class Choices:
    """The answers to one HTTP request: one, or `n` of them, or `n` for each of several prompts."""

    def __init__(self, request_id: str, on_end: Callable[[], None]) -> None:
        """`on_end` gives the place in the queue back once all have ended, read or not; it is idempotent."""
        self.id = request_id
        self.generations: list[Generation] = []
        self.changed = asyncio.Event()
        self._on_end = on_end

    def one_ended(self) -> None:
        if all(each.ended for each in self.generations):
            self._on_end()

    async def started(self) -> None:
        """Returns when something has come; raises the error that ended a choice."""
        await self.changed.wait()
        self._raise()

    async def progress(self, slots: Callable[[], Iterable[SlotStats]]) -> AsyncGenerator[SlotStats, None]:
        """How far the prompts are, each time that has changed, until the first event."""
        seen: dict[str, int] = {}
        while not self.changed.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), _PROGRESS_INTERVAL_S)
            own = {each.id for each in self.generations}
            for slot in slots():
                if slot.request_id in own and seen.get(slot.request_id) != slot.num_computed_tokens:
                    seen[slot.request_id] = slot.num_computed_tokens
                    yield slot

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """What comes, choice by choice. Raises the error that ended one, after the events before it."""
        open_choices = list(enumerate(self.generations))
        while open_choices:
            await self.changed.wait()
            self.changed.clear()
            for index, generation in list(open_choices):
                ended = generation.ended
                events, tokens = generation.take()
                if events or (ended and generation.error is None):
                    yield Piece(index, events, tokens, generation.finish_reason if ended else None)
                if ended:
                    open_choices.remove((index, generation))
            self._raise()

    def close(self) -> None:
        """Ends the engine's work on all that have not ended. Idempotent."""
        for generation in self.generations:
            generation.close()
        self._on_end()

    def _raise(self) -> None:
        error = next((each.error for each in self.generations if each.error is not None), None)
        if error is not None:
            raise error


async def whole(choices: Choices) -> list[Piece]:
    """All that comes of each choice as one piece; closes `choices`, whatever happens."""
    answers = [Piece(index) for index in range(len(choices.generations))]
    try:
        async for piece in choices.pieces():
            answer = answers[piece.index]
            answer.events += piece.events
            answer.tokens += piece.tokens
            answer.finish_reason = piece.finish_reason
    finally:
        choices.close()
    return answers


async def events_of(choices: Choices) -> list[Event]:
    """All of an answer of one choice; closes `choices`."""
    return (await whole(choices))[0].events
