"""Mistral: [TOOL_CALLS] and a JSON list of calls (to v7), or [TOOL_CALLS]f[ARGS]{...} for each call (v11 on).

Its templates want ids of nine letters and digits.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.base import Functions
from isthmus.server.tools.json_call import JsonCallParser

_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_MAX_HEAD = 1024  # of a name and an id: what is longer is no call


def _new_id() -> str:
    return uuid.uuid4().hex[:9]


class MistralParser(JsonCallParser):
    begins = ("[TOOL_CALLS]",)
    markers = (*begins, _CALL_ID, _ARGS)
    writes = CallFormat("[TOOL_CALLS]", _ARGS, "")
    writes_list = CallFormat(
        '{"name": "', '", "arguments": ', "}", list_begin="[TOOL_CALLS] [", separator=", ", list_end="]"
    )

    def __init__(self, functions: Functions, new_id: Callable[[], str] = _new_id) -> None:
        super().__init__(functions, new_id)

    @classmethod
    def format_for(cls, special_id: Callable[[str], int | None]) -> CallFormat:
        """Vocabularies before v11 have no token for the newer form."""
        return cls.writes if special_id(_ARGS) is not None else cls.writes_list

    def _calls(self, begin: str) -> Reading[bool]:
        yield from self._skip_space()
        if (yield from self._accept("[")):
            return (yield from self._list())
        call_id = None
        name, following = yield from self._head(_CALL_ID, _ARGS, "{")
        if following == _CALL_ID:
            call_id, following = yield from self._head(_ARGS, "{")
        if not name or following is None:
            return False
        if following == "{":  # right after the name: the models do so at times
            self._put_back("{")
        if not (yield from self._arguments(name, call_id)):
            return False
        self._end()
        return True

    def _head(self, *markers: str) -> Reading[tuple[str, str | None]]:
        text, marker = yield from self._collect_until(*markers)
        return (text.strip(), marker) if len(text) <= _MAX_HEAD else ("", None)

    def _list(self) -> Reading[bool]:
        while True:
            yield from self._skip_space()
            if not (yield from self._json_call()):
                return False
            self._end()
            yield from self._skip_space()
            if (yield from self._accept("]")) or not (yield from self._more()):
                return True
            if not (yield from self._accept(",")):
                return False
