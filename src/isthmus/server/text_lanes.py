"""Threads in which texts are rendered and tokenised: no short one waits for a long one.

The long lane computes little by itself: what takes long of a long text runs in native code and in a helper
process, both of low priority (tokenizer/low_priority.py, tokenizer/chat_template.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from isthmus.config import LONG_TEXT_CHARACTERS
from isthmus.server.body import body_bytes

T = TypeVar("T")

_SHORT_THREADS = 2


class TextLanes:
    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_THREADS, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long text")

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work` on the request that is being answered."""
        lane = self._long if body_bytes.get() >= LONG_TEXT_CHARACTERS else self._short
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
