"""gpt-oss (harmony): a message on the commentary channel whose recipient is functions.NAME.

    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

The recipient may also stand before the channel. Messages without one are read by `reasoning/harmony.py`,
which leaves only such calls in the text.
"""

from __future__ import annotations

import re

from isthmus.server.call_format import CallFormat
from isthmus.server.scanner import Reading
from isthmus.server.tools.base import ToolParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")


class HarmonyParser(ToolParser):
    begins = (START, CHANNEL)
    markers = MARKERS
    writes = CallFormat(
        CHANNEL + "commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}", "", single=True
    )  # its end is the end of the answer

    def _calls(self, begin: str) -> Reading[bool]:
        head, marker = yield from self._collect_until(MESSAGE)
        recipient = RECIPIENT.search(head)
        if marker is None or recipient is None:
            return False
        if not (yield from self._arguments(recipient["name"])):
            return False
        self._end()
        yield from self._skip_space()
        yield from self._accept(CALL, END, RETURN)  # the first of them ends the answer and is not in its text
        return True
