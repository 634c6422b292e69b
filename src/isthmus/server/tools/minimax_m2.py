"""MiniMax-M2: a list of calls, each argument an element.

<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="key">value</parameter>\\n</invoke>\\n
</minimax:tool_call>
"""

from __future__ import annotations

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.xml_call import NamedElementParser

_LIST, _LIST_END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"
_NAME_END = '">'


class MinimaxM2Parser(NamedElementParser):
    begins = (_LIST,)
    markers = (_LIST, _LIST_END)
    parameter, name_end = _PARAMETER, _NAME_END
    value_ends, function_end = (_PARAMETER_END,), _INVOKE_END
    writes = CallFormat(
        _INVOKE,
        _NAME_END + "\n",
        _INVOKE_END,
        list_begin=_LIST + "\n",
        separator="\n",
        list_end="\n" + _LIST_END,
        argument=(_PARAMETER, _NAME_END, _PARAMETER_END + "\n"),
    )

    def _calls(self, begin: str) -> Reading[bool]:
        while True:
            yield from self._skip_space()
            following = yield from self._accept(_INVOKE, _LIST_END)
            if following is None:
                return self._index >= 0 and not (yield from self._more())
            if following == _LIST_END:
                return True
            if not (yield from self._function()):
                return False
