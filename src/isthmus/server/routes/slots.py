"""`GET /slots`: what is computed at this moment, in llama-server's words. Numbers, no text of anybody."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from isthmus.engine.request import SlotStats
from isthmus.server.service import Service


def build(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/slots", operation_id="slots", summary="What is computed at this moment")
    async def slots() -> JSONResponse:
        info = service.require_ready()
        running = [slot for slot in service.engine.stats.slots if not slot.waiting]
        waiting = [slot for slot in service.engine.stats.slots if slot.waiting]
        shown = [_slot(index, slot, info.context_tokens) for index, slot in enumerate(running)]
        shown += [
            {"id": index, "n_ctx": info.context_tokens, "is_processing": False}
            for index in range(len(running), info.parallel)
        ]
        shown += [_slot(index, slot, info.context_tokens) for index, slot in enumerate(waiting, len(shown))]
        return JSONResponse(shown)

    return router


def _slot(index: int, slot: SlotStats, context_tokens: int) -> dict[str, Any]:
    return {
        "id": index,
        "id_task": slot.request_id,
        "n_ctx": context_tokens,
        "is_processing": not slot.waiting,
        "is_waiting": slot.waiting,
        "n_prompt_tokens": slot.num_prompt_tokens,
        "n_prompt_tokens_cache": slot.num_cached_tokens,
        "n_prompt_tokens_processed": min(slot.num_computed_tokens, slot.num_prompt_tokens),
        "n_decoded": slot.num_output_tokens,
    }
