"""Qwen3-Coder: each argument an element, its value between line ends.

<tool_call>\\n<function=f>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>
"""

from __future__ import annotations

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.xml_call import NamedElementParser

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderParser(NamedElementParser):
    begins = ("<tool_call>", _FUNCTION)  # the models now and then leave the first out
    markers = ("<tool_call>", "</tool_call>")
    parameter, name_end, value_begin = _PARAMETER, ">", "\n"
    value_ends, function_end = ("\n" + _PARAMETER_END, _PARAMETER_END), _FUNCTION_END
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
        if not (yield from self._function()):
            return False
        yield from self._skip_space()
        yield from self._accept("</tool_call>")
        return True
