"""Keeps user text apart from template text through a template's string logic: only the latter is parsed.

Before rendering, every character of user text that special tokens are made of (`<`, `|`, `>`, `[`, ...) is
replaced by a private-use character found nowhere in the request. What the template writes keeps its real
characters. Afterwards each private-use character marks its place as user text and turns back. So no special
token can form from user text, nor from pieces of it that a template joins. Lengths, trimming and joins are
unchanged, and what a template searches in a message (`content.split('</think>')`) is replaced alike, by the
helper process.

All of it holds the interpreter's lock, over texts of megabytes, while the event loop has tokens to pass on:
so it is a few dozen calls of str.replace and str.find, of under a millisecond a megabyte each. (str.translate
took 0.3 s for a megabyte of markup, and a segment for each replaced character three times as long.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from math import isfinite
from typing import Any

from isthmus.errors import UsageError
from isthmus.tokenizer.literals import any_of
from isthmus.tokenizer.segment import Segment

# Plane 16 is private use to its end; its characters have no case and are no space.
_FIRST, _LAST = 0x100000, 0x10FFFD

# Characters that a pattern is searched in at a time, since a search cannot be interrupted.
_WINDOW = 1 << 16

# Private-use characters that are searched for one by one, which takes 0.05 ms in a million others: mostly the
# first ones are free. For what has all these, a set of the texts' characters takes 60 ms, in windows too.
_TRIED = 64

# Left alone: quotes and the backslash, which JSON escapes, and what names of keys are made of.
_KEPT = frozenset("\"'\\_-./:$")


def barrier_characters(literals: Collection[str]) -> str:
    """Characters such that every literal has one: its symbols, or its first character if it has none."""
    characters: set[str] = set()
    for literal in literals:
        symbols = {c for c in literal if not c.isalnum() and not c.isspace()} - _KEPT
        characters |= symbols or {literal[0]}
    return "".join(sorted(characters))


class SpecialTexts:
    """The texts of special tokens: what they are found by, and the characters kept from users."""

    def __init__(self, literals: Collection[str]) -> None:
        self.characters = barrier_characters(literals)
        self.find = any_of(literals)
        self.longest = max(map(len, literals), default=0)


class Barrier:
    """`replacements`: character -> private-use character; neither these nor `mark` occur in `texts`."""

    def __init__(self, special: SpecialTexts, texts: Collection[str]) -> None:
        free = _unused([text for text in texts if not text.isascii()])
        try:
            self.replacements = {character: next(free) for character in special.characters}
            self.mark = next(free)  # for a place in a message that its rendering is asked about
        except StopIteration:
            raise UsageError("the messages use every private-use character of Unicode's plane 16") from None
        self._special = special
        marks = {replacement: c for c, replacement in self.replacements.items()}
        # A template may also write user text as ASCII JSON (U+100000 is \udbc0\udc00) or as Python prints it.
        escaped = {write(r)[1:-1]: c for r, c in marks.items() for write in (json.dumps, repr)}
        self._marks, self._all_marks = marks, marks | escaped
        self._longest_mark = max(map(len, self._all_marks), default=0)
        self._find_mark = re.compile("|".join(map(re.escape, self._all_marks)) or r"(?!)")

    def protect(self, value: Any) -> Any:
        """A copy of a JSON value with every text, and every key, behind the barrier.

        TypeError for what is no JSON value.
        """
        if isinstance(value, str):
            for character, replacement in self.replacements.items():
                value = value.replace(character, replacement)
            return value
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        if not (value is None or isinstance(value, int) or (isinstance(value, float) and isfinite(value))):
            raise TypeError(f"{value!r:.100} is not one")
        return value

    def restore(self, text: str) -> str:
        for mark, character in self._marks_in(text).items():
            text = text.replace(mark, character)
        return text

    def segments(self, rendered: str) -> list[Segment]:
        """The prompt, in which text of the template alone is special.

        Of that, only stretches between users' texts that have a special token in them, and the last one: the
        rest is the same text to a tokenizer, whoever wrote it, and goes with the users'.
        """
        segments, end = [], 0
        for begin, stop in self._stretches(rendered):
            segments.append(Segment(self.restore(rendered[end:begin]), special=False))
            segments.append(Segment(rendered[begin:stop], special=True))
            end = stop
        return [segment for segment in segments if segment.text]

    def _stretches(self, rendered: str) -> Iterator[tuple[int, int]]:
        """Where text without a mark stands that has a special token in it, or that ends the prompt."""
        marks, at = self._marks_in(rendered), 0
        while (found := self._search(self._special.find, self._special.longest, rendered, at)) is not None:
            begin = _end_of_last(marks, rendered, at, found.start())
            mark = self._search(self._find_mark if marks else None, self._longest_mark, rendered, found.end())
            stop = mark.start() if mark is not None else len(rendered)
            yield begin, stop
            at = stop
        yield _end_of_last(marks, rendered, at, len(rendered)), len(rendered)

    def _marks_in(self, text: str) -> dict[str, str]:
        """Those that may occur, with what they stand for."""
        escapes = "\\u" in text or "\\U" in text
        if text.isascii():
            return self._all_marks if escapes else {}
        return self._all_marks if escapes else self._marks

    @staticmethod
    def _search(pattern: re.Pattern[str] | None, longest: int, text: str, start: int) -> re.Match[str] | None:
        """The first match from `start` on; no match is longer than `longest`."""
        while pattern is not None and start < len(text):
            found = pattern.search(text, start, start + _WINDOW + longest)
            if found is not None and found.start() < start + _WINDOW:
                return found
            start += _WINDOW
        return None


def _unused(texts: Collection[str]) -> Iterator[str]:
    """Private-use characters that stand in none of the texts."""
    yield from (c for c in map(chr, range(_FIRST, _FIRST + _TRIED)) if not any(c in text for text in texts))
    used: set[str] = set()
    for text in texts:
        for begin in range(0, len(text), _WINDOW):
            used.update(text[begin : begin + _WINDOW])
    yield from (c for c in map(chr, range(_FIRST + _TRIED, _LAST + 1)) if c not in used)


def _end_of_last(marks: Collection[str], text: str, begin: int, end: int) -> int:
    """Behind the last of `marks` in text[begin:end]; `begin` if there is none."""
    for mark in marks:
        found = text.rfind(mark, begin, end)
        begin = max(begin, found + len(mark)) if found >= 0 else begin
    return begin
