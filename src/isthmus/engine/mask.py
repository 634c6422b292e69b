"""What the step loop asks of grammars: compile one, forbid tokens before sampling, be told the choice.

The loop knows no grammar library; whoever makes it hands in a `Grammars`. Compiling runs in a thread of the
loop's, since it may take a second: the request waits meanwhile and the others go on. Which tokens may come
next is found in threads too, while the step is computed whose logits it is for: a grammar that takes longer
than a step holds up its own request, neither the step nor others' masks. Masking runs once a step for all
rows that have one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from isthmus.engine.grammar_limits import GrammarThread
from isthmus.engine.request import Grammar
from isthmus.errors import UsageError
from isthmus.priority import lower_own_priority

# How long a step with nothing to compute waits for a grammar, or a tier, before commands are looked at again.
_PATIENCE_S = 0.02


# A step waits so long for masks that are not found yet, in all. A mask takes 0.1 to 1 ms, a small model's
# step maybe less.
_GRACE_S = 0.002

# A mask of more than this, on one core, is slow: five times what the others take.
_SLOW_S = 0.005

# Threads that find masks, made when all others are busy: of quick ones as many as there may be answers whose
# first mask turns out to be slow, of slow ones few, which leave the cores to the steps.
_QUICK_THREADS = 32
_SLOW_THREADS = 2

# Of one answer's masks, on one core: 100,000 tokens of JSON. A grammar for which that does not suffice keeps
# a core busy that all requests need.
MAX_MASK_SECONDS = 10.0


class TokenMask(Protocol):
    """One answer under a grammar: which tokens may come next. Used by one thread at a time."""

    def accept(self, token: int) -> None:
        """`token` was chosen; never a stop token. ValueError if it may not come here."""

    def prepare(self) -> None:
        """Finds what may come next. ValueError: that is beyond the limits of a grammar."""


class Grammars(Protocol):
    def compile(self, grammar: Grammar) -> TokenMask:
        """A mask before its first token. From any thread. UsageError: the grammar is bad or too large."""

    def mask(self, rows: Sequence[tuple[TokenMask, Tensor]]) -> None:
        """Writes -inf over every token that may not come next; each row is finite f32 [vocab], contiguous.

        The masks are prepared.

        Tokens that end the answer are open where it is complete, and only they where it cannot go on.
        """


class MaskThreads:
    """Those in which masks are found. No quick one waits for slow ones.

    An answer whose last mask was slow finds the next one in one of few threads of low priority, where slow
    ones wait for each other; once one is quick again, the answer is among the quick.
    """

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(_QUICK_THREADS, thread_name_prefix="mask")
        self._slow = ThreadPoolExecutor(
            _SLOW_THREADS, thread_name_prefix="slow mask", initializer=lower_own_priority
        )

    def submit(self, work: Callable[[], None], *, is_slow: bool) -> Future[None]:
        return (self._slow if is_slow else self._quick).submit(work)

    def close(self) -> None:
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)


class AnswerMask:
    """The mask of one answer, prepared for its next token or about to be."""

    def __init__(self, mask: TokenMask, threads: MaskThreads) -> None:
        self.mask = mask
        self._threads = threads
        self._seconds = 0.0
        self._is_slow = False
        self.prepared = self._submit(None)

    @property
    def error(self) -> BaseException | None:
        """Why it could not be prepared. Waits for it."""
        return self.prepared.exception()

    def accept(self, token: int) -> None:
        """Goes on behind a token that was chosen."""
        self.prepared = self._submit(token)

    def _submit(self, token: int | None) -> Future[None]:
        return self._threads.submit(partial(self._prepare, token), is_slow=self._is_slow)

    def _prepare(self, token: int | None) -> None:
        started = time.thread_time()
        if token is not None:
            self.mask.accept(token)
        self.mask.prepare()
        seconds = time.thread_time() - started
        self._seconds += seconds
        self._is_slow = seconds > _SLOW_S
        if self._seconds > MAX_MASK_SECONDS:
            raise ValueError(
                f"to find which tokens may come next took more than {MAX_MASK_SECONDS:g} s of a core: "
                "make it simpler, best without ambiguity"
            )


class Compiler:
    """Grammars in threads of their own. What makes them is made there too, for the first grammar."""

    def __init__(self, make: Callable[[], Grammars] | None) -> None:
        self._make = make
        self._grammars: Grammars | None = None
        self._thread = GrammarThread()
        self._mask_threads = MaskThreads()

    def start(self, grammar: Grammar) -> Future[TokenMask]:
        """UsageError if there is nothing that compiles."""
        if self._make is None:
            raise UsageError("this engine has no grammars: it cannot hold an answer to one")
        return self._thread.submit(partial(self._compile, self._make, grammar))

    def begin(self, mask: TokenMask) -> AnswerMask:
        return AnswerMask(mask, self._mask_threads)

    @staticmethod
    def wait_for_masks(masks: Collection[AnswerMask]) -> None:
        """Until all are prepared, or a step should not wait any longer."""
        unprepared = [mask.prepared for mask in masks if not mask.prepared.done()]
        if unprepared:
            wait(unprepared, timeout=_GRACE_S)

    def mask(self, rows: Sequence[tuple[AnswerMask, Tensor]]) -> None:
        if rows:
            assert self._grammars is not None, "a mask comes from `start`"
            self._grammars.mask([(mask.mask, row) for mask, row in rows])

    def close(self) -> None:
        self._mask_threads.close()
        self._thread.close()

    def _compile(self, make: Callable[[], Grammars], grammar: Grammar) -> TokenMask:
        if self._grammars is None:
            self._grammars = make()
        return self._grammars.compile(grammar)


def wait_briefly(awaited: Collection[Future[Any]]) -> None:
    """Until one of them is done, or new commands should be looked at."""
    if awaited:
        wait(awaited, timeout=_PATIENCE_S, return_when=FIRST_COMPLETED)
