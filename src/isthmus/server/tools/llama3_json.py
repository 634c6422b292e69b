"""Llama 3: the whole answer is {"name": "f", "parameters": {...}}, several are joined by "; ".

Nothing marks it as a call, so only the name of a function that was given makes it one.
"""

from __future__ import annotations

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.json_call import JsonCallParser

_PYTHON_TAG = "<|python_tag|>"


class Llama3JsonParser(JsonCallParser):
    markers = (_PYTHON_TAG,)
    writes = CallFormat('{"name": "', '", "parameters": ', "}", separator="; ")
    known_only = True

    def _read(self) -> Reading[None]:
        self._keep()
        yield from self._skip_space()
        yield from self._accept(_PYTHON_TAG)
        yield from self._skip_space()
        if (yield from self._more()) and self._text.startswith("{"):
            self._space = self._raw()
            yield from self._attempt("")
        else:
            self._content(self._raw())
        yield from super()._read()

    def _calls(self, begin: str) -> Reading[bool]:
        while (yield from self._json_call()):
            self._end()
            yield from self._skip_space()
            if not (yield from self._accept(";")):
                return not (yield from self._more())
            yield from self._skip_space()
        return False
