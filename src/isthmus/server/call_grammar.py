"""Calls of given functions as rules of a grammar, in the syntax of a dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.errors import UsageError
from isthmus.server.call_format import CallFormat
from isthmus.server.lark import Lark
from isthmus.server.tools.typed import types_of

# Keywords of a string's schema that a text between tags can be held to, or that say nothing of it.
_OF_TEXT = frozenset({"type", "description", "title", "default", "examples", "enum", "const"})


@dataclass(frozen=True)
class Called:
    """A function that may be called. lenient: what of its schema cannot be held is left out."""

    name: str
    schema: Mapping[str, Any]  # of the arguments
    lenient: bool = False


class CallGrammar:
    """A schema that cannot be held raises UsageError."""

    def __init__(self, lark: Lark, form: CallFormat) -> None:
        self._lark = lark
        self._form = form

    def calls(self, functions: Sequence[Called], *, several: bool, begun: str = "") -> str:
        """One call of any of them, or several. `begun`: the text before has the dialect's first marker."""
        lark, form = self._lark, self._form
        call = lark.rule(" | ".join(self._call(function) for function in functions))
        first = call
        if begun and not form.list_begin:
            first = lark.rule(" | ".join(self._call(function, begun) for function in functions))
        more = f"({lark.text(form.separator)} {call})*" if several and not form.single else ""
        list_begin = lark.text(form.list_begin.removeprefix(begun))
        return lark.rule(" ".join([list_begin, first, more, lark.text(form.list_end)]))

    def _call(self, function: Called, begun: str = "") -> str:
        lark, form = self._lark, self._form
        parts = [lark.text(form.begin.removeprefix(begun) + function.name + form.middle)]
        if form.after_number is not None:
            parts += [lark.pattern("[0-9]{1,3}"), lark.text(form.after_number)]
        if form.argument:
            arguments = self._elements(function)
        else:
            arguments = lark.json({"type": "object", **function.schema}, lenient=function.lenient)
        return lark.rule(" ".join([*parts, arguments, lark.text(form.end)]))

    def _elements(self, function: Called) -> str:
        """Each argument between its tags, in the order of the schema, those not required perhaps left out."""
        schema = function.schema
        properties = schema.get("properties") or {}
        if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
            raise UsageError("arguments are an object with properties")
        names = schema.get("required") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UsageError("required is a list of names")
        required = set(names)
        if not required <= set(properties):
            raise UsageError(f"required has {sorted(required - set(properties))}, which properties has not")
        elements = [
            self._element(function, name, properties[name]) + ("" if name in required else "?")
            for name in properties
        ]
        return " ".join(elements)

    def _element(self, function: Called, name: str, own: Any) -> str:
        assert self._form.argument is not None
        schema = function.schema
        begin, middle, end = self._form.argument
        lark = self._lark
        if "\n" in name or "<" in name or ">" in name:
            raise UsageError(f"an argument named {name!r} cannot be written in this model's syntax")
        head = lark.text(begin + name + middle)
        types = types_of(schema, name)
        if "string" not in types:
            definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            return lark.rule(
                f"{head} {lark.json({**definitions, **own}, lenient=function.lenient)} {lark.text(end)}"
            )
        own = own if isinstance(own, Mapping) else {}
        return lark.rule(f"{head} {self._text_value(own, end, lenient=function.lenient)}")

    def _text_value(self, own: Mapping[str, Any], end: str, *, lenient: bool) -> str:
        """A string as it is, with the tag that ends it."""
        lark = self._lark
        if not isinstance(own.get("type") or [], str | list):
            raise UsageError("type is a name or a list of names")
        alternatives = _schemas(own.get("anyOf") or [])
        plain = all(set(each) <= {"type", "title", "description"} for each in alternatives)
        unheld = sorted(set(own) - _OF_TEXT - ({"anyOf"} if plain else set()))
        if unheld and not lenient:
            raise UsageError(f"{', '.join(unheld)} of a string cannot be held in this model's syntax")
        choices = [own["const"]] if "const" in own else own.get("enum")
        if choices is not None:
            if not isinstance(choices, list):
                raise UsageError("enum is a list of values")
            texts = [value if isinstance(value, str) else json.dumps(value) for value in choices]
            if any(end.strip() in text for text in texts):
                raise UsageError("a value of an enum has the tag in it that ends an argument")
            either = " | ".join(lark.text(text) or '""' for text in texts)
            return f"({either}) {lark.text(end)}"
        return f"{lark.until(end.strip())} {lark.text(end[len(end.rstrip()) :])}"


def _schemas(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise UsageError("anyOf is a list of schemas")
    return value
