"""What the step loop asks of grammars: compile one, forbid tokens before sampling, be told the choice.

The loop knows no grammar library; whoever makes it hands in a `Grammars`. Compiling runs in a thread of the
loop's, since it may take a second: the request waits meanwhile and the others go on. Masking runs once a step
for all rows that have a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from isthmus.engine.request import Grammar


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
