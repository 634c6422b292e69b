"""Qwen3-Coder: each argument an element, its value between line ends.

<tool_call>\\n<function=f>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>
"""

from __future__ import annotations

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.xml_call import XmlCallParser

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderParser(XmlCallParser):
    begins = ("<tool_call>", _FUNCTION)  # the models now and then leave the first out
    markers = ("<tool_call>", "</tool_call>")
    writes = CallFormat(
        "<tool_call>\n" + _FUNCTION,
        ">\n",
        _FUNCTION_END + "\n</tool_call>",
        separator="\n",
        argument=(_PARAMETER, ">\n", "\n" + _PARAMETER_END + "\n"),
    )

    def _calls(self, begin: str) -> Reading[bool]:
        if begin != _FUNCTION:
            yield from self._skip_space()
            if not (yield from self._accept(_FUNCTION)):
                return False
        name = yield from self._name()
        if name is None:
            return False
        yield from self._skip_space()
        following = yield from self._accept(_PARAMETER, _FUNCTION_END)
        if following is None:
            return False
        self._start(name)
        self._argue("{")
        first = True
        while following == _PARAMETER:
            key = yield from self._name()
            if key is None:
                return False
            yield from self._accept("\n")
            ends = ("\n" + _PARAMETER_END, _PARAMETER_END)
            if not (yield from self._argument(name, key, first=first, ends=ends)):
                return False
            first = False
            yield from self._skip_space()
            following = yield from self._accept(_PARAMETER, _FUNCTION_END)
        if following is None:
            return False
        self._argue("}")
        self._end()
        yield from self._skip_space()
        yield from self._accept("</tool_call>")
        return True

    def _name(self) -> Reading[str | None]:
        """What stands before `>`; None if the line ends first."""
        name, marker = yield from self._collect_until(">", "\n")
        return name.strip() or None if marker == ">" else None
