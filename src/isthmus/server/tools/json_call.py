"""A call as one JSON object: {"name": ..., "arguments": {...}}, in any order, other keys beside them."""

from __future__ import annotations

from isthmus.server.scanner import Reading
from isthmus.server.tools.base import ToolParser

_ARGUMENTS = ("arguments", "parameters")


class JsonCallParser(ToolParser):
    """The part of the dialects that write calls as JSON objects."""

    known_only = False  # only names of given functions make a call

    def _json_call(self) -> Reading[bool]:
        """Reads the object from its `{` to its `}`; announces the call as soon as it is known to be one."""
        name: str | None = None
        early: list[str] = []  # arguments that stand before the name
        started = False
        if not (yield from self._accept("{")):
            return False
        while True:
            yield from self._skip_space()
            key = yield from self._string()
            yield from self._skip_space()
            if key is None or not (yield from self._accept(":")):
                return False
            yield from self._skip_space()
            if key == "name" and name is None:
                name = yield from self._string()
                if name is None or (self.known_only and name not in self._functions):
                    return False
                if early:
                    started = True
                    self._start(name)
                    self._argue("".join(early))
            elif key in _ARGUMENTS and not started and not early:
                if name is None:
                    done = yield from self._object(early.append)
                else:
                    started = True
                    self._start(name)
                    done = yield from self._object(self._argue)
                if not done:
                    return False
            elif (yield from self._string()) is None:  # an id, a type: {"type": "function", ...}
                return False
            yield from self._skip_space()
            following = yield from self._accept(",", "}")
            if following is None:
                return False
            if following == "}":
                break
        if name is None:
            return False
        if not started:
            self._start(name)
            self._argue("{}")
        return True
