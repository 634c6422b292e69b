"""How one model writes thoughts and tool calls, found in its chat template; and the parser for one answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.errors import UsageError
from isthmus.server import reasoning, tools
from isthmus.server.events import Content, Event, Parser, PlainParser
from isthmus.server.tools import Functions
from isthmus.tokenizer import Segment

AUTO, NONE = "auto", "none"

_TOOLS = re.compile(r"\btools\b")  # the variable that templates get them in


@dataclass(frozen=True)
class Dialect:
    """Names of parsers; None: none. `in_words`: the template has no place for tools (see tools/described)."""

    tools: str | None = None
    reasoning: str | None = None
    in_words: bool = False

    @classmethod
    def of(cls, template: str, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> Dialect:
        """That of a chat template, where "auto" is said; UsageError for a name that is no parser's."""
        in_words = not _TOOLS.search(template)
        # Where a template has tools and no dialect fits, what its model writes is not known: text.
        detected = tools.detect(template) or ("hermes" if in_words else None)
        return cls(
            _chosen("--tool-parser", tool_parser, tools.PARSERS, detected),
            _chosen("--reasoning-parser", reasoning_parser, reasoning.PARSERS, reasoning.detect(template)),
            in_words,
        )

    def markers(self, *, with_tools: bool) -> frozenset[str]:
        """Special tokens that the parsers need to see, and so are text of an answer."""
        found: set[str] = set()
        if with_tools and self.tools is not None:
            found.update(tools.PARSERS[self.tools].markers)
        if self.reasoning is not None:
            found.update(reasoning.PARSERS[self.reasoning].markers)
        return frozenset(found)

    def begins_inside(self, prompt: Sequence[Segment]) -> bool:
        """Whether a rendered prompt has opened a block of thoughts that the answer goes on with."""
        if self.reasoning is None or not prompt or not prompt[-1].special:
            return False
        end = prompt[-1].text.rstrip()
        if self.reasoning == "harmony":
            return end.endswith("<|channel|>analysis<|message|>")
        return end.endswith(reasoning.PARSERS[self.reasoning].markers[0])

    def parser(self, functions: Functions | None, *, inside: bool) -> Parser:
        """A fresh one for one answer. `functions`: those that may be called; None where none may."""
        stages: list[Parser] = []
        if self.reasoning is not None:
            stages.append(reasoning.PARSERS[self.reasoning](inside=inside))
        if self.tools is not None and functions is not None:
            stages.append(tools.PARSERS[self.tools](functions))
        if not stages:
            return PlainParser()
        return stages[0] if len(stages) == 1 else _Chain(*stages)


class _Chain:
    """What the first parser takes for content is read by the second."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first = first
        self._second = second

    def push(self, text: str) -> list[Event]:
        return self._on(self._first.push(text))

    def finish(self) -> list[Event]:
        return [*self._on(self._first.finish()), *self._second.finish()]

    def _on(self, events: Sequence[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            result += self._second.push(event.text) if isinstance(event, Content) else [event]
        return result


def _chosen(flag: str, name: str, parsers: Mapping[str, Any], detected: str | None) -> str | None:
    if name == AUTO:
        return detected
    if name == NONE:
        return None
    if name not in parsers:
        raise UsageError(f"{flag} {name!r}: the parsers are {', '.join([AUTO, NONE, *parsers])}")
    return name
