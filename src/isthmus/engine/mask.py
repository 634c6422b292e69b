"""What the step loop asks of grammars: compile one, forbid tokens before sampling, be told the choice.

The loop knows no grammar library; whoever makes it hands in a `Grammars`. Compiling runs in a thread of the
loop's, since it may take a second: the request waits meanwhile and the others go on. Masking runs once a step
for all rows that have a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from torch import Tensor

from isthmus.engine.request import Grammar
from isthmus.errors import UsageError

# How long a step with nothing to compute waits for a grammar, or a tier, before commands are looked at again.
_PATIENCE_S = 0.02


class TokenMask(Protocol):
    """One answer under a grammar: which tokens may come next. Used by the loop's thread alone."""

    def accept(self, token: int) -> None:
        """`token` was chosen; never a stop token. ValueError if it may not come here."""


class Grammars(Protocol):
    def compile(self, grammar: Grammar) -> TokenMask:
        """A mask before its first token. From any thread. UsageError: the grammar is bad or too large."""

    def mask(self, rows: Sequence[tuple[TokenMask, Tensor]]) -> None:
        """Writes -inf over every token that may not come next; each row is finite f32 [vocab], contiguous.

        Tokens that end the answer are open where it is complete, and only they where it cannot go on.
        """


class Compiler:
    """Grammars in a thread of their own. What makes them is made there too, for the first grammar."""

    def __init__(self, make: Callable[[], Grammars] | None) -> None:
        self._make = make
        self._grammars: Grammars | None = None
        self._thread: ThreadPoolExecutor | None = None

    def start(self, grammar: Grammar) -> Future[TokenMask]:
        """UsageError if there is nothing that compiles."""
        if self._make is None:
            raise UsageError("this engine has no grammars: it cannot hold an answer to one")
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        return self._thread.submit(self._compile, self._make, grammar)

    def mask(self, rows: Sequence[tuple[TokenMask, Tensor]]) -> None:
        if rows:
            assert self._grammars is not None, "a mask comes from `start`"
            self._grammars.mask(rows)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, make: Callable[[], Grammars], grammar: Grammar) -> TokenMask:
        if self._grammars is None:
            self._grammars = make()
        return self._grammars.compile(grammar)


def wait_briefly(awaited: Collection[Future[Any]]) -> None:
    """Until one of them is done, or new commands should be looked at."""
    if awaited:
        wait(awaited, timeout=_PATIENCE_S, return_when=FIRST_COMPLETED)
