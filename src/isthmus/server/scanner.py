"""The base of the answer parsers: text that arrives in pieces, read as if it were all there.

A parser is one generator, `_read`, which asks for text by `yield from` these helpers and is resumed when more
has come. No helper decides before the text it has decides, so the events joined are the same however the text
was cut. Nothing is read twice: what turns out not to be a call is given back as the text it was (`_raw`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from isthmus.server.events import Event

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
Emit: TypeAlias = Callable[[str], None]

_SPACE = " \t\r\n"
_MAX_JSON_STRING = 4096  # of a name or an id, with its quotes


class Scanner:
    """One answer. A subclass has `_read`; it returns when the text has ended."""

    def __init__(self) -> None:
        self._text = ""  # arrived, not read
        self._ended = False
        self._events: list[Event] = []
        self._kept: list[str] | None = None  # what was read since `_keep`
        self._reading = self._read()
        self._resume()

    def push(self, text: str) -> list[Event]:
        self._text += text
        return self._resume()

    def finish(self) -> list[Event]:
        self._ended = True
        return self._resume()

    def _read(self) -> Reading[None]:
        raise NotImplementedError

    def _resume(self) -> list[Event]:
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def _put_back(self, taken: str) -> None:
        """Undoes the last `_take`."""
        self._text = taken + self._text
        if self._kept:
            self._kept.pop()

    def _keep(self) -> None:
        """From here on remember what is read."""
        self._kept = []

    def _raw(self) -> str:
        """What was read since `_keep`, which is forgotten."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def _more(self) -> Reading[bool]:
        """Waits for text to be there; False if it has ended."""
        while not self._text and not self._ended:
            yield
        return bool(self._text)

    def _accept(self, *literals: str) -> Reading[str | None]:
        """Reads the longest of `literals` that the text begins with, or nothing: None."""
        while not self._ended and any(
            len(self._text) < len(literal) and literal.startswith(self._text) for literal in literals
        ):
            yield
        found = max((each for each in literals if self._text.startswith(each)), key=len, default=None)
        if found is not None:
            self._take(len(found))
        return found

    def _skip_space(self) -> Reading[None]:
        while (yield from self._more()):
            count = len(self._text) - len(self._text.lstrip(_SPACE))
            self._take(count)
            if self._text:
                return

    def _until(self, *markers: str, emit: Emit) -> Reading[str | None]:
        """Reads up to the first of `markers` and past it; the text before goes to `emit` as it comes.

        Returns the marker (of several at one place the longest), None if the text ended without.
        """
        while True:
            found = _first(self._text, markers)
            # A longer marker may still begin before the end of the one found, or be completed by what comes.
            held = min((_held_from(self._text, marker) for marker in markers), default=len(self._text))
            if found is not None and (self._ended or found[0] < held):
                start, marker = found
                if start:
                    emit(self._take(start))
                self._take(len(marker))
                return marker
            end = len(self._text) if self._ended else held if found is None else min(held, found[0])
            if end:
                emit(self._take(end))
            if self._ended:
                return None
            yield

    def _collect_until(self, *markers: str) -> Reading[tuple[str, str | None]]:
        """The text before the first of `markers`, and the marker."""
        parts: list[str] = []
        marker = yield from self._until(*markers, emit=parts.append)
        return "".join(parts), marker

    def _string(self) -> Reading[str | None]:
        """A JSON string, decoded; None, and less than all of it read, if there is none."""
        if not (yield from self._accept('"')):
            return None
        parts = ['"']
        length = escaped = 0
        while length < _MAX_JSON_STRING and (yield from self._more()):
            character = self._take(1)
            parts.append(character)
            length += 1
            if character == '"' and not escaped:
                try:
                    text = json.loads("".join(parts))
                except ValueError:
                    return None
                return str(text)
            escaped = character == "\\" and not escaped
        return None


def _first(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """(start, marker) of the first marker in `text`, of several at one place the longest."""
    places = [(text.find(marker), -len(marker), marker) for marker in markers]
    found = min((place for place in places if place[0] >= 0), default=None)
    return None if found is None else (found[0], found[2])


def _held_from(text: str, marker: str) -> int:
    """Where the longest end of `text` begins that is a beginning of `marker` and not all of it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
