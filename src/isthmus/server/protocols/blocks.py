"""Events grouped into blocks: a stretch of text, of thoughts, or one tool call.

Anthropic's messages and OpenAI's responses both send an answer as such blocks, each with a beginning, parts
and an end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from isthmus.server.events import Content, Event, Reasoning, ToolArguments, ToolCall, joined


@dataclass
class Block:
    """`text`: what it says so far; of a call the JSON of its arguments."""

    index: int
    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True)
class Opened:
    block: Block


@dataclass(frozen=True)
class Added:
    block: Block
    text: str


@dataclass(frozen=True)
class Closed:
    block: Block


Step: TypeAlias = Opened | Added | Closed


class Blocks:
    """`done`: the blocks of the answer so far, all closed but maybe the last."""

    def __init__(self) -> None:
        self.done: list[Block] = []
        self._open: Block | None = None

    def push(self, event: Event) -> list[Step]:
        if isinstance(event, ToolCall):
            return self._begin(Block(len(self.done), "call", call=event))
        if isinstance(event, Content | Reasoning):
            kind: Literal["text", "reasoning"] = "text" if isinstance(event, Content) else "reasoning"
            steps = []
            if self._open is None or self._open.kind != kind:
                steps = self._begin(Block(len(self.done), kind))
            return [*steps, self._add(event.text)]
        if isinstance(event, ToolArguments) and self._open is not None:
            return [self._add(event.text)]
        return []  # a call that broke: what was sent of it stays

    def finish(self) -> list[Step]:
        block, self._open = self._open, None
        return [Closed(block)] if block is not None else []

    def _begin(self, block: Block) -> list[Step]:
        steps = self.finish()
        self.done.append(block)
        self._open = block
        return [*steps, Opened(block)]

    def _add(self, text: str) -> Step:
        assert self._open is not None
        self._open.text += text
        return Added(self._open, text)


def whole_blocks(events: Iterable[Event]) -> list[Block]:
    """The blocks of a whole answer."""
    blocks = Blocks()
    for event in joined(events):
        blocks.push(event)
    return blocks.done
