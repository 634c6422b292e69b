"""Keeps user text apart from template text through a template's string logic: only the latter is parsed.

Before rendering, every character of user text that special tokens are made of (`<`, `|`, `>`, `[`, ...) is
replaced by a private-use character found nowhere in the request. What the template writes keeps its real
characters. Afterwards each private-use character marks its place as user text and turns back. So no special
token can form from user text, nor from pieces of it that a template joins. Lengths, trimming and joins are
unchanged, and what a template searches in a message (`content.split('</think>')`) is replaced alike, by the
helper process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from isthmus.errors import UsageError
from isthmus.tokenizer.segment import Segment

# Plane 16 is private use to its end; its characters have no case and are no space.
_FIRST, _LAST = 0x100000, 0x10FFFD

# Characters that are looked at in one go: a search holds the interpreter's lock, and over a megabyte for as
# long as ten tokens take that the event loop has to pass on.
_WINDOW = 8192

# Left alone: quotes and the backslash, which JSON escapes, and what names of keys are made of.
_KEPT = frozenset("\"'\\_-./:$")


def barrier_characters(literals: Collection[str]) -> str:
    """Characters such that every literal has one: its symbols, or its first character if it has none."""
    characters: set[str] = set()
    for literal in literals:
        symbols = {c for c in literal if not c.isalnum() and not c.isspace()} - _KEPT
        characters |= symbols or {literal[0]}
    return "".join(sorted(characters))


class Barrier:
    """`replacements`: character -> private-use character, none of which occurs in `texts`."""

    def __init__(self, characters: str, texts: Collection[str]) -> None:
        used = {ord(c) for text in texts if not text.isascii() for c in set(text) if ord(c) >= _FIRST}
        free = (code for code in range(_FIRST, _LAST + 1) if code not in used)
        try:
            self.replacements = {character: chr(next(free)) for character in characters}
        except StopIteration:
            raise UsageError("the messages use every private-use character of Unicode's plane 16") from None
        self._table = str.maketrans(self.replacements)
        self._original = {replacement: c for c, replacement in self.replacements.items()}
        # A template may also write user text as ASCII JSON (U+100000 is \udbc0\udc00) or as Python prints it.
        escaped = {write(r)[1:-1]: c for r, c in self._original.items() for write in (json.dumps, repr)}
        self._original |= escaped
        alternatives = "|".join(map(re.escape, self._original))
        self._find = re.compile(f"(?:{alternatives}){{1,{_WINDOW}}}" if alternatives else r"(?!)")
        self._longest = max(map(len, self._original), default=0)
        self._one = re.compile(alternatives or r"(?!)")

    def protect(self, value: Any) -> Any:
        """A copy of a JSON value with every text, and every key, behind the barrier."""
        if isinstance(value, str):
            return value.translate(self._table)
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        return self._one.sub(lambda match: self._original[match[0]], text)

    def segments(self, rendered: str) -> list[Segment]:
        """Template text as special segments; what the barrier replaced as others, in its own characters."""
        return [segment for segment in self._cut(rendered) if segment.text]

    def _cut(self, rendered: str) -> Iterator[Segment]:
        end = 0
        for match in self._matches(rendered):
            yield Segment(rendered[end : match.start()], special=True)
            yield Segment(self.restore(match[0]), special=False)
            end = match.end()
        yield Segment(rendered[end:], special=True)

    def _matches(self, rendered: str) -> Iterator[re.Match[str]]:
        """Runs of replaced characters; a long one in several."""
        start = 0
        while start < len(rendered):
            end = start + _WINDOW
            found = self._find.search(rendered, start, end + self._longest)
            if found is None or found.start() >= end:
                start = end
                continue
            match = self._find.match(rendered, found.start())  # all of it: the window may have cut it
            assert match is not None
            yield match
            start = match.end()
