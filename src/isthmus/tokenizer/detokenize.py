"""Token ids into text as they arrive: whole characters only, and nothing that may still become a stop string.

However the ids are spread over calls, the texts joined are the same. Knows nothing about stop ids: the engine
ends an answer at those, and pushing one changes nothing because special tokens are not shown.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from isthmus.errors import UsageError
from isthmus.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """One answer. `stopped` is the stop string that ended it, or None; after that every push gives ""."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        continues: bool = False,
        shown: Collection[str] = (),
    ) -> None:
        """`stop`: texts that end the answer and are not part of it; a special token may be named by its text.
        `shown`: texts of special tokens that are part of the text, for whoever reads structure from it.

        `continues`: the answer goes on from a visible text, so SentencePiece's space before its first word
        stays.
        """
        if isinstance(stop, str) or any(not isinstance(text, str) or not text for text in stop):
            raise UsageError(f"stop must be a list of texts, none of them empty, got {stop!r}")
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stop = frozenset(stop)
        self._shown = frozenset(shown)
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop)]
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strips_leading_space and not continues
        self._held = ""  # decoded, but may be the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that is certain after this token: "", or more than its own. UsageError for a bad id."""
        if self.stopped is not None:
            return ""
        if self._tokenizer.is_special(token):
            literal = self._tokenizer.token_text(token)
            if literal in self._stop:
                return self._end(literal)
            if literal not in self._shown:
                return ""
        data = self._tokenizer.token_bytes(token)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._emit(self._utf8.decode(data))

    def finish(self) -> str:
        """What was held back; half a character at the end becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._emit(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if self.stopped is not None else text + held

    def _end(self, stop: str) -> str:
        text = self._held + self._utf8.decode(b"", final=True)
        self.stopped, self._held = stop, ""
        return text

    def _emit(self, text: str) -> str:
        """Character by character: the first stop string to be complete wins, however the text was cut."""
        if not self._matchers:
            return text
        held = self._held + text
        for end in range(len(self._held) + 1, len(held) + 1):
            for matcher in self._matchers:
                if matcher.advance(held[end - 1]):
                    self.stopped, self._held = matcher.text, ""
                    return held[: end - len(matcher.text)]
        keep = max(matcher.matched for matcher in self._matchers)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


class _Matcher:
    """Knuth-Morris-Pratt: `matched` is the length of the longest suffix so far that begins `text`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)  # [i]: the same for text[: i + 1] without itself
        for i in range(1, len(text)):
            self._fallback[i] = self._next(self._fallback[i - 1], text[i])

    def advance(self, character: str) -> bool:
        """True when the whole text has just been seen."""
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.text)

    def _next(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)
