"""Request bodies in /openapi.json: FastAPI documents those that it reads itself, and body.py reads ours."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """What a route passes as `openapi_extra`. `model` must not contain itself."""
    schema = model.model_json_schema()
    inlined = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with each `$ref` replaced by what it names: pydantic's references are relative to a document
    that /openapi.json is not."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}
