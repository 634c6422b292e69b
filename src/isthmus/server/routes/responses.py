"""`POST /v1/responses`: OpenAI's newer protocol over the same chat. Stateless: nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from isthmus.server.body import read_model, validated
from isthmus.server.generation import Choices, events_of
from isthmus.server.openapi import documented_body
from isthmus.server.protocols import responses as protocol
from isthmus.server.protocols.blocks import Blocks, whole_blocks
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.schemas.responses import UNSUPPORTED, ResponsesRequest
from isthmus.server.service import Service
from isthmus.server.sse import OPENAI, stream_of, until_gone


def build(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/responses",
        operation_id="responses",
        summary="An answer to a conversation, as a response",
        openapi_extra=documented_body(ResponsesRequest),
    )
    async def responses(request: Request) -> Response:
        body = await read_model(request, ResponsesRequest, service.options, UNSUPPORTED)
        chat = validated(body.chat_fields(), ChatRequest)
        answer = _stream if body.stream else _whole
        return await until_gone(request.receive, answer(service, body, chat))

    return router


async def _whole(service: Service, body: ResponsesRequest, chat: ChatRequest) -> Response:
    choices = await service.start_chat(chat, "resp_")
    blocks = whole_blocks(await events_of(choices))
    return JSONResponse(protocol.Response(choices, body, service.model_id).object(blocks))


async def _stream(service: Service, body: ResponsesRequest, chat: ChatRequest) -> Response:
    choices = await service.start_chat(chat, "resp_")
    response = protocol.Response(choices, body, service.model_id)
    frames = _frames(response, choices)
    style = replace(OPENAI, error=response.error)
    return await stream_of(choices, frames, service.options.ping_interval_s, style)


async def _frames(response: protocol.Response, choices: Choices) -> AsyncGenerator[bytes, None]:
    blocks = Blocks()
    await choices.started()
    yield response.begin()
    async for piece in choices.pieces():
        for event in piece.events:
            for step in blocks.push(event):
                yield response.step(step)
    for step in blocks.finish():
        yield response.step(step, is_last=True)
    yield response.end(blocks.done)
