"""`POST /tokenize`, `/detokenize` and `/apply-template`: what the model reads, as token ids and as text.

They need no engine. `/tokenize` takes a text (`content`) or a conversation (`messages`).
`GET /tokenizer_info` is vLLM's: with it lm-eval tokenises here and needs no tokenizer of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from isthmus.errors import UsageError
from isthmus.server.body import read_fields, read_model, validated
from isthmus.server.errors import ApiError
from isthmus.server.openapi import documented_body
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from isthmus.server.service import Service
from isthmus.server.unsupported import IN_PROMPTS, refuse_unsupported


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
        refuse_unsupported(fields, IN_PROMPTS)
        body: ChatRequest | TokenizeRequest
        body = validated(fields, ChatRequest) if "messages" in fields else validated(fields, TokenizeRequest)
        service.check_model(body.model)
        with_pieces = fields.get("with_pieces") is True
        return await _json(service, lambda: _tokens(service, body, with_pieces=with_pieces))

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
        body = validated(await read_fields(request, service.options), DetokenizeRequest)
        service.check_model(body.model)
        return await _json(service, lambda: _decode(service, body))

    @router.post(
        "/apply-template",
        operation_id="apply_template",
        summary="A conversation as the model reads it",
        openapi_extra=documented_body(ChatRequest),
    )
    async def apply_template(request: Request) -> Response:
        chat = await read_model(request, ChatRequest, service.options, IN_PROMPTS)
        service.check_model(chat.model)
        return await _json(service, lambda: {"prompt": _text(service, chat)})

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


async def _json(service: Service, work: Callable[[], dict[str, Any]]) -> Response:
    """The result of `work`, made and written in a thread: a million tokens are megabytes."""
    data = await service.in_thread(lambda: msgspec.json.encode(work()))
    return Response(data, media_type="application/json")


def _tokens(service: Service, body: ChatRequest | TokenizeRequest, *, with_pieces: bool) -> dict[str, Any]:
    if isinstance(body, ChatRequest):
        ids = service.tokenizer.encode_segments(service.prompts.segments_of(body))
    else:
        ids = service.tokenizer.encode(
            body.content,
            add_special=body.add_special is True,
            parse_special=body.parse_special is not False,
        )
    info = service.engine.info
    return {
        "tokens": [_with_piece(service, token) for token in ids] if with_pieces else ids,
        "count": len(ids),
        "max_model_len": service.context_tokens(info) if info else None,
    }


def _text(service: Service, chat: ChatRequest) -> str:
    return "".join(segment.text for segment in service.prompts.segments_of(chat))


def _decode(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    try:
        text = service.tokenizer.decode(body.tokens, skip_special=False)
    except UsageError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens", code="invalid_value") from None
    return {"content": text, "prompt": text}


def _with_piece(service: Service, token: int) -> dict[str, Any]:
    """The text of a token; its bytes where it is part of a character."""
    data = service.tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
