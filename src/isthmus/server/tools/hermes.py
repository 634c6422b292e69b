"""Hermes, Qwen2.5, Qwen3: <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call> for each call."""

from __future__ import annotations

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.json_call import JsonCallParser


class HermesParser(JsonCallParser):
    begins = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")
    writes = CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")

    def _calls(self, begin: str) -> Reading[bool]:
        yield from self._skip_space()
        if not (yield from self._json_call()):
            return False
        yield from self._skip_space()
        closed = yield from self._accept("</tool_call>")
        # Some models end their turn instead of closing the last call.
        if closed is None and (yield from self._more()):
            return False
        self._end()
        return True
