"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol over the same chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from isthmus.server.body import read_model, validated
from isthmus.server.generation import Choices, events_of
from isthmus.server.openapi import documented_body
from isthmus.server.protocols import anthropic
from isthmus.server.protocols.blocks import Blocks
from isthmus.server.schemas.anthropic import UNSUPPORTED, CountRequest, MessagesRequest
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.service import Service
from isthmus.server.sse import ANTHROPIC, stream_of, until_gone


def build(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/messages",
        operation_id="messages",
        summary="An answer to a conversation, in Anthropic's protocol",
        openapi_extra=documented_body(MessagesRequest),
    )
    async def messages(request: Request) -> Response:
        body = await read_model(request, MessagesRequest, service.options, UNSUPPORTED)
        answer = _stream if body.stream else _whole
        return await until_gone(request.receive, answer(service, validated(body.chat_fields(), ChatRequest)))

    @router.post(
        "/v1/messages/count_tokens",
        operation_id="count_tokens",
        summary="Tokens of a conversation, in Anthropic's protocol",
        openapi_extra=documented_body(CountRequest),
    )
    async def count_tokens(request: Request) -> Response:
        return await service.answer_of_text("/v1/messages/count_tokens", request)

    return router


async def _whole(service: Service, chat: ChatRequest) -> Response:
    choices = await service.start_chat(chat, "msg_")
    return JSONResponse(anthropic.whole(choices, service.model_id, await events_of(choices)))


async def _stream(service: Service, chat: ChatRequest) -> Response:
    choices = await service.start_chat(chat, "msg_")
    return await stream_of(choices, _frames(service, choices), service.options.ping_interval_s, ANTHROPIC)


async def _frames(service: Service, choices: Choices) -> AsyncGenerator[bytes, None]:
    blocks = Blocks()
    await choices.started()
    yield anthropic.begin(choices, service.model_id)
    async for piece in choices.pieces():
        for event in piece.events:
            for step in blocks.push(event):
                yield anthropic.step(step)
    for step in blocks.finish():
        yield anthropic.step(step)
    yield anthropic.end(choices)
