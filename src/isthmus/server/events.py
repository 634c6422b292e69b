"""What an answer is made of, as every endpoint sees it: text, thoughts and tool calls, in small pieces.

A parser turns the model's text into these events as it arrives; the endpoints write them in their dialects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class Content:
    """Text of the answer; never empty."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of what the model thinks before it answers; never empty."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call begins. `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """The next part of the JSON text of a call's arguments; it may end anywhere. Never empty."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallBroken:
    """The call that was open is none after all: `text` is what it was, from the call's beginning on.

    Where the call has been sent already (a stream) it stays there with arguments that are no JSON, and this
    is ignored; `joined` takes the call out and makes the text content.
    """

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | ToolCall | ToolArguments | ToolCallBroken


class Parser(Protocol):
    """Pure and incremental: however the text is cut into pushes, the events joined are the same."""

    def push(self, text: str) -> Sequence[Event]: ...

    def finish(self) -> Sequence[Event]:
        """What was held back, when the text has ended."""
        ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> Sequence[Event]:
        return [Content(text)] if text else []

    def finish(self) -> Sequence[Event]:
        return []


def joined(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of one kind joined into one event, and without calls that broke.

    A call that broke and began before these events stays, and so does the word of it.
    """
    result: list[Event] = []
    for event in events:
        if isinstance(event, ToolCallBroken) and any(_begins(each, event.index) for each in result):
            result = [each for each in result if getattr(each, "index", None) != event.index]
            event = Content(event.text)
        last = result[-1] if result else None
        if isinstance(event, ToolCall | ToolCallBroken) or not _continues(last, event):
            result.append(event)
        else:
            assert last is not None
            assert not isinstance(last, ToolCall | ToolCallBroken)
            result[-1] = replace(last, text=last.text + event.text)
    return result


def _begins(event: Event, index: int) -> bool:
    return isinstance(event, ToolCall) and event.index == index


def _continues(last: Event | None, event: Event) -> bool:
    same_call = getattr(last, "index", None) == getattr(event, "index", None)
    return type(last) is type(event) and same_call
