"""Kimi-K2: a section of calls, each with its id functions.NAME:NUMBER, which the template wants back.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}
<|tool_call_end|>...<|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.base import ToolParser

_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?")


class KimiK2Parser(ToolParser):
    begins = (_SECTION,)
    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END)
    writes = CallFormat(
        _CALL + "functions.",
        ":",
        _CALL_END,
        list_begin=_SECTION,
        list_end=_SECTION_END,
        after_number=_ARGUMENTS,
    )

    def _calls(self, begin: str) -> Reading[bool]:
        while True:
            yield from self._skip_space()
            following = yield from self._accept(_CALL, _SECTION_END)
            if following is None:
                return self._index >= 0 and not (yield from self._more())
            if following == _SECTION_END:
                return True
            head, marker = yield from self._collect_until(_ARGUMENTS)
            call = _ID.fullmatch(head.strip())
            if marker is None or call is None:
                return False
            if not (yield from self._arguments(call["name"], head.strip())):
                return False
            yield from self._skip_space()
            if not (yield from self._accept(_CALL_END)) and (yield from self._more()):
                return False
            self._end()
