"""`GET /health` and `/ready`: 200 when a request would be taken, else 503 and why.

/health is open without the API key. While the model loads /ready says how far that is.
"""

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
        return _state({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", operation_id="ready", summary="Whether the model is loaded, and how far that is")
    async def ready() -> JSONResponse:
        done, total = service.engine.loaded_bytes
        progress = {"loaded_bytes": done, "total_bytes": total} if total else {}
        info = service.engine.info
        facts = {} if info is None else {"threads": info.threads, "parallel": info.parallel, "isa": info.isa}
        return _state({"status": "ok", "model": service.model_id} | facts, progress)

    def _state(body: dict[str, Any], while_loading: dict[str, Any] | None = None) -> JSONResponse:
        try:
            service.require_ready()
        except ApiError as error:
            body = {"status": service.engine.state} | error.body | (while_loading or {})
            return JSONResponse(body, error.status, error.headers)
        return JSONResponse(body)

    return router
