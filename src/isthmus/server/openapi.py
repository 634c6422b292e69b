"""Request bodies in /openapi.json: FastAPI documents those that it reads itself, and body.py reads ours."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from isthmus.server.schemas import BODIES

_REF = "#/components/schemas/{model}"


def documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """What a route passes as `openapi_extra`; `model` must stand in BODIES."""
    assert model in BODIES
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI) -> None:
    """Adds the definitions that those references point to."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        document = build()
        _, definitions = models_json_schema([(model, "validation") for model in BODIES], ref_template=_REF)
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it
