"""What the dialects of tool calls share: content between calls, ids, and arguments sent on as they arrive."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from isthmus.server.call_format import CallFormat
from isthmus.server.events import Content, ToolArguments, ToolCall, ToolCallBroken
from isthmus.server.scanner import Reading, Scanner
from isthmus.server.tools.json_text import ObjectText

# name of a function -> its JSON schema of parameters
Functions = Mapping[str, Mapping[str, Any]]


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolParser(Scanner):
    """Finds the calls in an answer. A subclass names its dialect's beginnings and reads one call.

    `markers`: the special tokens that this dialect writes, which must reach the parser as text. White space
    between content and calls belongs to neither.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[CallFormat]
    begins: ClassVar[tuple[str, ...]] = ()  # any of them ends content and begins a call, or a list of calls

    def __init__(self, functions: Functions, new_id: Callable[[], str] = new_call_id) -> None:
        self._functions = functions
        self._new_id = new_id
        self._index = -1  # of the last call that was announced
        self._is_open = False  # its arguments are not complete
        self._space = ""  # content, if more content follows
        super().__init__()

    @classmethod
    def format_for(cls, special_id: Callable[[str], int | None]) -> CallFormat:
        """How a model with this vocabulary writes calls. `special_id`: the special token of a text."""
        return cls.writes

    def _read(self) -> Reading[None]:
        while True:
            begin = yield from self._until(*self.begins, emit=self._content)
            if begin is None:
                break
            yield from self._attempt(begin)
        if self._space:
            self._events.append(Content(self._space))

    def _attempt(self, begin: str) -> Reading[None]:
        """Reads calls after `begin`; text that is none becomes content."""
        self._kept = [begin]
        well = yield from self._calls(begin)
        raw = self._raw()
        if well:
            self._space = ""
            yield from self._skip_space()
        elif self._is_open:
            self._is_open = False
            self._events.append(ToolCallBroken(self._index, self._space + raw))
            self._space = ""
        else:
            self._content(raw)

    def _calls(self, begin: str) -> Reading[bool]:
        """Reads what follows `begin`; False as soon as it is not this dialect."""
        raise NotImplementedError

    def _content(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._events.append(Content(shown))

    def _start(self, name: str, call_id: str | None = None) -> None:
        """Announces a call."""
        self._index += 1
        self._is_open = True
        self._events.append(ToolCall(self._index, call_id or self._new_id(), name))

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(ToolArguments(self._index, text))

    def _end(self) -> None:
        """The call is complete: what follows cannot break it."""
        self._is_open = False
        self._space = ""
        if self._kept is not None:
            self._kept = []

    def _object(self, emit: Callable[[str], None]) -> Reading[bool]:
        """Reads a JSON object; its text goes to `emit` as it comes, for as long as it is JSON."""
        value = ObjectText()
        while value.is_open and (yield from self._more()):
            good: list[str] = []
            for character in self._text:
                good.append(value.feed(character))
                if not value.is_open:
                    break
            self._take(len(good) - (value.state == "wrong"))
            emit("".join(good))
        return value.state == "done"

    def _arguments(self, name: str, call_id: str | None = None) -> Reading[bool]:
        """Reads a call's arguments, which are a JSON object, and announces the call when they begin."""
        yield from self._skip_space()
        if not (yield from self._more()) or not self._text.startswith("{"):
            return False
        self._start(name, call_id)
        return (yield from self._object(self._argue))
