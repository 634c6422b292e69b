"""The part of the dialects that write each argument as an element: its value is text up to a closing tag."""

from __future__ import annotations

import json

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
