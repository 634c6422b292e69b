"""Guessing the next tokens by prompt lookup: what followed the last time these tokens stood here.

A draft is verified by computing its tokens as further rows of one step. Each token of the answer is chosen
from the logits as it would be without a draft, by the same draw; the draft's next row is of use if it guessed
that token. So the answer is the same, whatever was guessed, and a guess costs only rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.config import MAX_DRAFT

MATCH_TOKENS = (3, 2)  # the longer match first: it guesses better
# A row of a mixture of experts reads experts of its own, so a wrong guess is not free: the length of a draft
# doubles when all of it was right and halves when none was.
MIN_DRAFT, FIRST_DRAFT = 1, 4


class PromptLookup:
    """Drafts for one sequence. Told of its tokens as they come; a token costs two look-ups."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # n tokens -> where the one after them last stood
        self._seen = 0
        self._length = FIRST_DRAFT

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """Guesses of what follows `tokens`, which are those of the last call and more. May be none."""
        for end in range(max(self._seen, 1), len(tokens)):  # what stands before the last token is indexed
            for count in MATCH_TOKENS:
                if end >= count:
                    self._after[tuple(tokens[end - count : end])] = end
        self._seen = len(tokens)
        for count in MATCH_TOKENS:
            at = self._after.get(tuple(tokens[-count:])) if len(tokens) > count else None
            if at is not None:
                return list(tokens[at : at + self._length])
        return []

    def learn(self, drafted: int, accepted: int) -> None:
        """How the last draft did."""
        if drafted and accepted == drafted:
            self._length = min(2 * self._length, MAX_DRAFT)
        elif drafted and accepted == 0:
            self._length = max(self._length // 2, MIN_DRAFT)
