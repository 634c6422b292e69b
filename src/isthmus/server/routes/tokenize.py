"""`POST /tokenize`, `/detokenize` and `/apply-template`: what the model reads, as token ids and as text.

They need no engine; what they do is in text_work.py. `/tokenize` takes a text (`content`) or a conversation
(`messages`).
`GET /tokenizer_info` is vLLM's: with it lm-eval tokenises here and needs no tokenizer of its own.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from isthmus.server.openapi import documented_body
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from isthmus.server.service import Service


def build(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/tokenize",
        operation_id="tokenize",
        summary="Token ids of a text or a conversation",
        openapi_extra=documented_body(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        return await service.answer_of_text("/tokenize", request)

    @router.get("/tokenizer_info", operation_id="tokenizer_info", summary="Special tokens and chat template")
    async def tokenizer_info() -> Response:
        return JSONResponse(_facts(service))

    @router.post(
        "/detokenize",
        operation_id="detokenize",
        summary="The text of token ids",
        openapi_extra=documented_body(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        return await service.answer_of_text("/detokenize", request)

    @router.post(
        "/apply-template",
        operation_id="apply_template",
        summary="A conversation as the model reads it",
        openapi_extra=documented_body(ChatRequest),
    )
    async def apply_template(request: Request) -> Response:
        return await service.answer_of_text("/apply-template", request)

    return router


def _facts(service: Service) -> dict[str, Any]:
    """Texts of the special tokens, as `/tokenize` reads them; None for one that the model has not."""
    tokenizer, info = service.tokenizer, service.engine.info
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    texts = {name: None if token is None else tokenizer.token_text(token) for name, token in ids.items()}
    return texts | {
        "add_bos_token": tokenizer.add_bos,
        "model_max_length": service.context_tokens(info) if info else None,
        "chat_template": service.template.source,
    }
