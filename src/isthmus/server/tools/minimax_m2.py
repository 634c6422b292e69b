"""MiniMax-M2: a list of calls, each argument an element.

<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="key">value</parameter>\\n</invoke>\\n
</minimax:tool_call>
"""

from __future__ import annotations

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.xml_call import XmlCallParser

_LIST, _LIST_END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"
_NAME_END = '">'


class MinimaxM2Parser(XmlCallParser):
    begins = (_LIST,)
    markers = (_LIST, _LIST_END)
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
            if not (yield from self._call()):
                return False

    def _call(self) -> Reading[bool]:
        name = yield from self._name()
        if name is None:
            return False
        yield from self._skip_space()
        following = yield from self._accept(_PARAMETER, _INVOKE_END)
        if following is None:
            return False
        self._start(name)
        self._argue("{")
        first = True
        while following == _PARAMETER:
            key = yield from self._name()
            if key is None:
                return False
            if not (yield from self._argument(name, key, first=first, ends=(_PARAMETER_END,))):
                return False
            first = False
            yield from self._skip_space()
            following = yield from self._accept(_PARAMETER, _INVOKE_END)
        if following is None:
            return False
        self._argue("}")
        self._end()
        return True

    def _name(self) -> Reading[str | None]:
        """Of a function or parameter; None if the line ends first."""
        name, marker = yield from self._collect_until(_NAME_END, "\n")
        return name.strip() or None if marker == _NAME_END else None
