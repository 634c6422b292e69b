"""`POST /tokenize`, `/detokenize` and `/apply-template`: what the model reads, as token ids and as text.

They need no engine. `/tokenize` takes a text (`content`) or a conversation (`messages`).
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from isthmus.errors import UsageError
from isthmus.server.body import read_fields, validated
from isthmus.server.errors import ApiError
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
        fields = await read_fields(request, service.options)
        if "messages" in fields:
            chat = validated(fields, ChatRequest)
            service.check_model(chat.model)
            ids = await service.in_thread(
                lambda: service.tokenizer.encode_segments(service.prompts.segments_of(chat))
            )
            with_pieces = fields.get("with_pieces") is True
        else:
            body = validated(fields, TokenizeRequest)
            service.check_model(body.model)
            ids = await service.in_thread(lambda: _encode(service, body))
            with_pieces = body.with_pieces is True
        tokens = [_with_piece(service, token) for token in ids] if with_pieces else ids
        info = service.engine.info
        return JSONResponse(
            {
                "tokens": tokens,
                "count": len(ids),
                "max_model_len": service.context_tokens(info) if info else None,
            }
        )

    @router.post(
        "/detokenize",
        operation_id="detokenize",
        summary="The text of token ids",
        openapi_extra=documented_body(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        body = validated(await read_fields(request, service.options), DetokenizeRequest)
        service.check_model(body.model)
        text = await service.in_thread(lambda: _decode(service, body))
        return JSONResponse({"content": text, "prompt": text})

    @router.post(
        "/apply-template",
        operation_id="apply_template",
        summary="A conversation as the model reads it",
        openapi_extra=documented_body(ChatRequest),
    )
    async def apply_template(request: Request) -> Response:
        chat = validated(await read_fields(request, service.options), ChatRequest)
        service.check_model(chat.model)
        segments = await service.in_thread(lambda: service.prompts.segments_of(chat))
        return JSONResponse({"prompt": "".join(segment.text for segment in segments)})

    return router


def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    return service.tokenizer.encode(
        body.content,
        add_special=body.add_special is True,
        parse_special=body.parse_special is not False,
    )


def _decode(service: Service, body: DetokenizeRequest) -> str:
    try:
        return service.tokenizer.decode(body.tokens, skip_special=False)
    except UsageError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens", code="invalid_value") from None


def _with_piece(service: Service, token: int) -> dict[str, Any]:
    """The text of a token; its bytes where it is part of a character."""
    data = service.tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
