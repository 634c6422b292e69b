"""gpt-oss (harmony): messages on channels. Analysis is thought, final and commentary are content.

A message with a recipient is a tool call and is left as it is, for `tools/harmony.py`.
"""

from __future__ import annotations

import re

from isthmus.server.events import Content, Reasoning
from isthmus.server.scanner import Reading, Scanner
from isthmus.server.tools.harmony import CALL, CHANNEL, END, MARKERS, MESSAGE, RECIPIENT, RETURN, START

_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_ENDS = (END, RETURN, CALL)


class HarmonyReasoningParser(Scanner):
    """`inside`: the prompt has opened an analysis message."""

    markers = MARKERS

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        super().__init__()

    def _read(self) -> Reading[None]:
        if self._inside:
            yield from self._until(*_ENDS, emit=self._reason)
        while True:
            # Text without a head: a prompt may have written it (`<|channel|>final<|message|>`).
            begin = yield from self._until(START, CHANNEL, *_ENDS, emit=self._content)
            if begin is None:
                return
            if begin in (START, CHANNEL):
                yield from self._message(begin)

    def _message(self, begin: str) -> Reading[None]:
        rest, marker = yield from self._collect_until(MESSAGE)
        head = begin + rest + (marker or "")
        channel = _CHANNEL.search(head)
        if marker is None or channel is None or RECIPIENT.search(head):
            self._content(head)
            end = yield from self._until(*_ENDS, emit=self._content)
            self._content(end or "")
        else:
            emit = self._reason if channel[1] == "analysis" else self._content
            yield from self._until(*_ENDS, emit=emit)

    def _content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _reason(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))
