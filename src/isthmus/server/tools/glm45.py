"""GLM-4.5 and later: the function's name, then keys and values as elements.

<tool_call>f\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>
"""

from __future__ import annotations

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.xml_call import XmlCallParser

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm45Parser(XmlCallParser):
    begins = (_CALL,)
    markers = (_CALL, _CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    writes = CallFormat(
        _CALL,
        "\n",
        _CALL_END,
        separator="\n",
        argument=(_KEY, _KEY_END + "\n" + _VALUE, _VALUE_END + "\n"),
    )

    def _calls(self, begin: str) -> Reading[bool]:
        yield from self._skip_space()
        name, following = yield from self._collect_until("\n", _KEY, _CALL_END)
        name = name.strip()
        if following == "\n":
            yield from self._skip_space()
            following = yield from self._accept(_KEY, _CALL_END)
        if following is None or not name or "{" in name or "<" in name:
            return False
        self._start(name)
        self._argue("{")
        first = True
        while following == _KEY:
            key, marker = yield from self._collect_until(_KEY_END)
            yield from self._skip_space()
            if marker is None or not (yield from self._accept(_VALUE)):
                return False
            if not (yield from self._argument(name, key.strip(), first=first, ends=(_VALUE_END,))):
                return False
            first = False
            yield from self._skip_space()
            following = yield from self._accept(_KEY, _CALL_END)
        if following is None:
            return False
        self._argue("}")
        self._end()
        return True
