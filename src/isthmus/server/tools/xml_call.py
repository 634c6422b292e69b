"""The part of the dialects that write each argument as an element: its value is text up to a closing tag."""

from __future__ import annotations

import json
from typing import ClassVar

from isthmus.server.scanner import Reading
from isthmus.server.tools.base import ToolParser
from isthmus.server.tools.typed import escaped, to_json, types_of


class XmlCallParser(ToolParser):
    def _argument(self, function: str, key: str, *, first: bool, ends: tuple[str, ...]) -> Reading[bool]:
        """Reads a value up to one of `ends`. Strings are sent on as they come, other values when complete."""
        types = types_of(self._functions.get(function) or {}, key)
        self._argue(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        if types == {"string"}:
            self._argue('"')
            marker = yield from self._until(*ends, emit=lambda text: self._argue(escaped(text)))
            if marker is not None:
                self._argue('"')
            return marker is not None
        value, marker = yield from self._collect_until(*ends)
        if marker is not None:
            self._argue(to_json(value, types))
        return marker is not None


class NamedElementParser(XmlCallParser):
    """Dialects whose opening tags hold the names, of a function and of each of its parameters."""

    parameter: ClassVar[str]  # what stands before a parameter's name,
    name_end: ClassVar[str]  # behind that and a function's,
    value_begin: ClassVar[str] = ""  # before a value, if the model writes it,
    value_ends: ClassVar[tuple[str, ...]]  # behind the value
    function_end: ClassVar[str]  # and behind all parameters

    def _function(self) -> Reading[bool]:
        """A call from its name on."""
        name = yield from self._name()
        if name is None:
            return False
        yield from self._skip_space()
        following = yield from self._accept(self.parameter, self.function_end)
        if following is None:
            return False
        self._start(name)
        self._argue("{")
        first = True
        while following == self.parameter:
            key = yield from self._name()
            if key is None:
                return False
            if self.value_begin:
                yield from self._accept(self.value_begin)
            if not (yield from self._argument(name, key, first=first, ends=self.value_ends)):
                return False
            first = False
            yield from self._skip_space()
            following = yield from self._accept(self.parameter, self.function_end)
        if following is None:
            return False
        self._argue("}")
        self._end()
        return True

    def _name(self) -> Reading[str | None]:
        """None if the line ends first."""
        name, marker = yield from self._collect_until(self.name_end, "\n")
        return name.strip() or None if marker == self.name_end else None
