"""DeepSeek: a list of calls between markers; the arguments of V3 and R1 stand in a JSON code block.

    V3, R1  [calls begin][call begin]function[sep]f\\n```json\\n{...}\\n```[call end]...[calls end]
    V3.1    [calls begin][call begin]f[sep]{...}[call end]...[calls end]

The markers are special tokens, such as `<|tool_calls_begin|>` with a fullwidth bar and a block for `|`, `_`.
"""

from __future__ import annotations

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.base import ToolParser

_BAR, _BLOCK = "\uff5c", "\u2581"


def _marker(*words: str) -> str:
    return f"<{_BAR}{_BLOCK.join(words)}{_BAR}>"


LIST, LIST_END = _marker("tool", "calls", "begin"), _marker("tool", "calls", "end")
CALL, CALL_END = _marker("tool", "call", "begin"), _marker("tool", "call", "end")
SEPARATOR = _marker("tool", "sep")


class DeepseekV31Parser(ToolParser):
    begins = (LIST,)
    markers = (LIST, LIST_END, CALL, CALL_END, SEPARATOR)
    writes = CallFormat(CALL, SEPARATOR, CALL_END, list_begin=LIST, list_end=LIST_END)

    def _calls(self, begin: str) -> Reading[bool]:
        while True:
            yield from self._skip_space()
            following = yield from self._accept(CALL, LIST_END)
            if following is None:
                return self._index >= 0 and not (yield from self._more())
            if following == LIST_END:
                return True
            head, marker = yield from self._collect_until(SEPARATOR)
            if marker is None or not (yield from self._call(head.strip())):
                return False
            yield from self._skip_space()
            if not (yield from self._accept(CALL_END)) and (yield from self._more()):
                return False
            self._end()

    def _call(self, head: str) -> Reading[bool]:
        """What stands between separator and end."""
        return bool(head) and (yield from self._arguments(head))


class DeepseekV3Parser(DeepseekV31Parser):
    writes = CallFormat(
        CALL + "function" + SEPARATOR,
        "\n```json\n",
        "\n```" + CALL_END,
        list_begin=LIST,
        separator="\n",
        list_end=LIST_END,
    )

    def _call(self, head: str) -> Reading[bool]:
        if head != "function":
            return False
        name, marker = yield from self._collect_until("\n```json")
        if marker is None or not name.strip():
            return False
        if not (yield from self._arguments(name.strip())):
            return False
        yield from self._skip_space()
        return (yield from self._accept("```")) is not None or not (yield from self._more())
