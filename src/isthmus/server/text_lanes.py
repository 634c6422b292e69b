"""The way of texts: short ones in threads, long ones apart, so that no short one waits for a long one.

A request for a text's sake alone (/tokenize and the like) stands in a line of its own kind of text, which has
an end: the engine's queue does not count it. One for an answer has its place there and stands in no line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from isthmus.config import LONG_TEXT_CHARACTERS
from isthmus.server.body import body_bytes
from isthmus.server.errors import unavailable
from isthmus.server.prompts import Prompted
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.schemas.completions import CompletionRequest
from isthmus.server.text_process import Ask
from isthmus.server.text_work import CHAT, COMPLETION, WORK, TextSide, unpacked
from isthmus.tokenizer.json_lines import encode

T = TypeVar("T")

_SHORT_THREADS = 2
_LONG_PROMPT_THREADS = 2  # one for each process for long texts
_RETRY_S = 2


class Lane:
    """Threads, and the line before them: at most `most_waiting` wait in it, in the order they came."""

    def __init__(self, num_threads: int, name: str, most_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._turns = asyncio.Semaphore(num_threads)
        self._most_waiting = most_waiting
        self.num_waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def run_in_line(self, work: Callable[[], T]) -> T:
        """ApiError 503 if too many wait. Who is cancelled leaves the line."""
        if self._turns.locked() and self.num_waiting >= self._most_waiting:
            message = f"{self.num_waiting} texts are waiting, which is all this server queues"
            raise unavailable(message, "queue_full", _RETRY_S)
        self.num_waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.num_waiting -= 1
        try:
            return await self.run(work)
        finally:
            self._turns.release()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Asked(Protocol):
    """What works on long texts: LongTexts, or a stand-in."""

    def ask(self, ask: Ask, /) -> bytes: ...
    def close(self) -> None: ...


class InThread:
    """A stand-in that works in the thread that asks."""

    def __init__(self, side: TextSide) -> None:
        self._side = side

    def ask(self, ask: Ask) -> bytes:
        return WORK[ask.what](self._side, ask.data, ask.context_tokens)

    def close(self) -> None:
        pass


class TextLanes:
    def __init__(self, side: TextSide, long_texts: Asked | None, most_waiting: int) -> None:
        """long_texts: None for what has no file to read a vocabulary from."""
        self._side = side
        self._long_texts = long_texts or InThread(side)
        self.short = Lane(_SHORT_THREADS, "text", most_waiting)
        self.long = Lane(1, "long text", most_waiting)
        self.long_prompts = Lane(_LONG_PROMPT_THREADS, "long prompt", most_waiting)

    async def answer(self, path: str, body: bytes, context_tokens: int | None) -> bytes:
        """What a request to `path` gets. ApiError, 503 for one too many."""
        if _is_long():
            return await self.long.run_in_line(partial(self._long_texts.ask, Ask(path, body, context_tokens)))
        return await self.short.run_in_line(partial(WORK[path], self._side, body, context_tokens))

    async def of_chat(self, chat: ChatRequest, context_tokens: int) -> Prompted:
        def here() -> Prompted:
            return prompts.of_conversation(prompts.conversation_of(chat), context_tokens)

        def apart() -> Prompted:
            data = encode(vars(prompts.conversation_of(chat)))
            return unpacked(self._long_texts.ask(Ask(CHAT, data, context_tokens, for_answer=True)))

        prompts = self._side.prompts
        return await self._prompted(here, apart)

    async def of_completion(self, body: CompletionRequest, context_tokens: int) -> Prompted:
        def here() -> Prompted:
            return self._side.prompts.of_texts(body.prompt, context_tokens, add_special=add_special)

        def apart() -> Prompted:
            data = encode({"texts": body.prompt, "add_special": add_special})
            return unpacked(self._long_texts.ask(Ask(COMPLETION, data, context_tokens, for_answer=True)))

        add_special = body.add_special_tokens is not False
        return await self._prompted(here, apart)

    async def _prompted(self, here: Callable[[], Prompted], apart: Callable[[], Prompted]) -> Prompted:
        return await (self.long_prompts.run(apart) if _is_long() else self.short.run(here))

    def close(self) -> None:
        for lane in (self.short, self.long, self.long_prompts):
            lane.close()
        self._long_texts.close()


def _is_long() -> bool:
    """Whether the request that the running task answers is."""
    return body_bytes.get() >= LONG_TEXT_CHARACTERS
