"""Thoughts between tags at the beginning of an answer: <think>...</think>, Mistral's [THINK]...[/THINK]."""

from __future__ import annotations

from isthmus.server.events import Content, Reasoning
from isthmus.server.scanner import Reading, Scanner


class ThinkParser(Scanner):
    """`inside`: the prompt has opened the block. White space around the thoughts belongs to nothing."""

    begin, end = "<think>", "</think>"
    markers: tuple[str, ...] = (begin, end)

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._space = ""  # part of the thoughts, if they go on
        super().__init__()

    def _read(self) -> Reading[None]:
        if not self._inside:
            self._keep()
            yield from self._skip_space()
            if not (yield from self._accept(self.begin)):
                self._content(self._raw())
                yield from self._until(emit=self._content)
                return
            self._raw()
        elif not (yield from self._more()):
            return
        yield from self._skip_space()
        yield from self._accept(self.begin)  # some models repeat what the prompt ended with
        yield from self._skip_space()
        yield from self._until(self.end, emit=self._reason)
        yield from self._skip_space()
        yield from self._until(emit=self._content)

    def _content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _reason(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._events.append(Reasoning(shown))


class MistralThinkParser(ThinkParser):
    begin, end = "[THINK]", "[/THINK]"
    markers = (begin, end)
