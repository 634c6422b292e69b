"""`POST /v1/chat/completions`: one answer to a conversation, whole or as a stream.

A request that fails before its first token is an HTTP error also when it asked for a stream: the headers wait
for that token, or for the first ping if it takes long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from isthmus import __version__
from isthmus.server.body import read_model
from isthmus.server.errors import ApiError
from isthmus.server.generation import Generation
from isthmus.server.openapi import documented_body
from isthmus.server.schemas import ChatRequest
from isthmus.server.service import Service
from isthmus.server.sse import EventStream, frame, until_gone


def build(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        operation_id="chat_completions",
        summary="An answer to a conversation",
        openapi_extra=documented_body(ChatRequest),
    )
    async def chat_completions(request: Request) -> Response:
        chat = await read_model(request, ChatRequest, service.options)
        if chat.stream_options is not None and not chat.stream:
            message = "stream_options says how to stream: send 'stream': true with it"
            raise ApiError(400, message, param="stream_options", code="invalid_value")
        answer = _stream if chat.stream else _whole
        return await until_gone(request.receive, answer(service, chat))

    return router


async def _whole(service: Service, chat: ChatRequest) -> Response:
    generation = await service.start_chat(chat)
    try:
        text = "".join([piece async for piece in generation.pieces()])
    finally:
        generation.close()
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": generation.finish_reason}
    head = _head(service, generation, "chat.completion")
    return JSONResponse(head | {"choices": [choice], "usage": _usage(generation)})


async def _stream(service: Service, chat: ChatRequest) -> Response:
    generation = await service.start_chat(chat)
    interval_s = service.options.ping_interval_s
    try:
        async with asyncio.timeout(interval_s):
            await generation.started()
    except TimeoutError:
        pass  # a long prefill: the stream begins with pings
    except BaseException:
        generation.close()
        raise
    head = _head(service, generation, "chat.completion.chunk")
    frames = _chunks(head, generation, include_usage=chat.include_usage)
    return EventStream(frames, ping_interval_s=interval_s, on_end=generation.close)


async def _chunks(
    head: dict[str, Any], generation: Generation, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Role, then text, then the reason of the end, then the usage if it was asked for."""
    if include_usage:
        head = head | {"usage": None}  # on every chunk but the last, as OpenAI does

    def chunk(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return frame(head | {"choices": [choice]})

    await generation.started()
    yield chunk({"role": "assistant", "content": ""})
    async for piece in generation.pieces():
        yield chunk({"content": piece})
    yield chunk({}, generation.finish_reason)
    if include_usage:
        yield frame(head | {"choices": [], "usage": _usage(generation)})


def _head(service: Service, generation: Generation, kind: str) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": kind,
        "created": int(time.time()),
        "model": service.model_id,
        "system_fingerprint": f"isthmus-{__version__}",
    }


def _usage(generation: Generation) -> dict[str, int]:
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
