"""Texts and JSON as rules of one lark grammar, with special tokens where the vocabulary has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from llguidance import regex_to_lark

from isthmus.engine.grammar import json_rule


class Lark:
    """Rules that grow. Every method gives the right side of a rule, to be put together by the caller.

    A marker that is one special token is written as that token: `<tool_call>` spelled in letters is not what
    the model was trained with, and text cannot contain it.
    """

    def __init__(self, special_id: Callable[[str], int | None], markers: Collection[str]) -> None:
        self._ids = {marker: token for marker in markers if (token := special_id(marker)) is not None}
        self._rules: list[str] = []
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if self._ids else None

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])

    def text(self, text: str) -> str:
        """Exactly this text; "" for the empty one."""
        parts: list[str] = []
        end = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            parts += [_quoted(text[end : match.start()]), f"<[{self._ids[match[0]]}]>"]
            end = match.end()
        return " ".join(filter(None, [*parts, _quoted(text[end:])]))

    def pattern(self, pattern: str) -> str:
        return self.rule(f"/{pattern}/")

    def json(self, schema: Any, *, lenient: bool = False) -> str:
        return self.rule(json_rule(schema, lenient=lenient))

    def own(self, syntax: str, definition: str) -> str:
        """A grammar of the caller's, as it would be alone."""
        if syntax == "regex":
            return self.pattern(regex_to_lark(definition, ""))
        return self.rule(f"%lark {{\n{definition}\n}}")

    def free(self, *, without: Sequence[str] = ()) -> str:
        """Any text, also none, with none of `without` in it, not even spelled in letters; no special tokens.

        Parsers read text: to them a marker is one, however the model came to write it.
        """
        return self.rule("/(?s:.*)/" + _excluding(without), terminal=True)

    def until(self, marker: str, *, without: Sequence[str] = ()) -> str:
        """Any text up to the first `marker`, and the marker; none of `without` before it."""
        if marker in self._ids:
            return f"{self.free(without=[marker, *without])} {self.text(marker)}"
        text = f"/(?s:.*){_escaped(marker)}/" + _excluding(without)
        return self.rule(text, options="[lazy]")

    def rule(self, body: str, *, terminal: bool = False, options: str = "") -> str:
        """The name of a new rule."""
        name = f"{'T' if terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name


def _excluding(texts: Sequence[str]) -> str:
    return f" & ~/(?s:.*)({'|'.join(map(_escaped, texts))})(?s:.*)/" if texts else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n").replace("\\\\n", r"\n")
