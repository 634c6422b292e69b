"""Arguments of the XML dialects: texts, which become JSON by what the function's schema says they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_PYTHON = {"True": True, "False": False, "None": None}  # some templates print values as Python does


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON types that the schema allows an argument to have; only "string" where it says nothing."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema)) or frozenset({"string"})


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    found: set[str] = set()
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else _list(kind)
    found.update(each for each in kinds if isinstance(each, str) and each in _TYPES)
    for key in ("anyOf", "oneOf", "allOf"):
        for each in _list(schema.get(key)):
            found |= _types(each)
    if not found:
        values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        found = {name for value in values for name, types in _TYPES.items() if type(value) in types}
    if not found and "$ref" in schema:
        return {"object", "string"}
    return found


def _list(value: Any) -> list[Any]:
    """Nobody has checked a client's schema: what is no list where one belongs says nothing."""
    return value if isinstance(value, list) else []


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of an argument. A text that is none of the types stays a string: the client decides."""
    stripped = text.strip()
    try:
        value = _PYTHON[stripped] if stripped in _PYTHON else json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if any(type(value) in _TYPES[kind] for kind in types if kind != "string"):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def escaped(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
