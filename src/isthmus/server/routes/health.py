"""`GET /health`: 200 when a request would be taken, else 503 and why. Open without the API key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from isthmus.server.errors import ApiError
from isthmus.server.service import Service


def build(service: Service) -> APIRouter:
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", operation_id="health", summary="Whether requests are taken")
    async def health() -> JSONResponse:
        body: dict[str, Any] = {"status": "ok"}
        try:
            service.require_ready()
        except ApiError as error:
            body = {"status": service.engine.state} | error.body
            return JSONResponse(body, error.status, error.headers)
        return JSONResponse(body)

    return router
