"""`GET /metrics`: numbers for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from isthmus.server.service import Service


def build(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", operation_id="metrics", summary="Numbers for Prometheus")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router
