"""`GET /v1/models` and `/v1/models/{id}`: the one model, under its id and its other names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from isthmus.server.service import Service


def build(service: Service) -> APIRouter:
    router = APIRouter()

    def describe(name: str) -> dict[str, Any]:
        info = service.engine.info
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "isthmus",
            # What one request may use, prompt and answer together; vLLM's name, which clients read.
            "max_model_len": service.context_tokens(info) if info else None,
        }

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", operation_id="list_models", summary="The models served")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [describe(name) for name in service.names]})

    @router.head("/v1/models/{name:path}", include_in_schema=False)
    @router.get("/v1/models/{name:path}", operation_id="get_model", summary="One model")
    async def get_model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(describe(name))

    return router
