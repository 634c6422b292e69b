"""`POST /v1/chat/completions`: answers to a conversation, whole or as a stream.

A request that fails before its first token is an HTTP error also when it asked for a stream: the headers wait
for that token, or for the first ping if it takes long.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from isthmus import __version__
from isthmus.engine.request import SlotStats
from isthmus.server.body import read_model
from isthmus.server.errors import ApiError
from isthmus.server.events import Content, Event, Reasoning, ToolArguments, ToolCall, joined
from isthmus.server.generation import Choices, Piece, whole
from isthmus.server.logprobs import chat_logprobs
from isthmus.server.openapi import documented_body
from isthmus.server.schemas.base import Sampling
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.service import Service
from isthmus.server.sse import frame, stream_of, until_gone
from isthmus.server.unsupported import IN_CHATS
from isthmus.server.usage import totals_of


def build(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        operation_id="chat_completions",
        summary="An answer to a conversation",
        openapi_extra=documented_body(ChatRequest),
    )
    async def chat_completions(request: Request) -> Response:
        chat = await read_model(request, ChatRequest, service.options, IN_CHATS)
        check_stream_options(chat)
        answer = _stream if chat.stream else _whole
        return await until_gone(request.receive, answer(service, chat))

    return router


def check_stream_options(request: Sampling) -> None:
    if request.stream_options is not None and not request.stream:
        message = "stream_options says how to stream: send 'stream': true with it"
        raise ApiError(400, message, param="stream_options", code="invalid_value")


def head_of(service: Service, request_id: str, kind: str) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": service.model_id,
        "system_fingerprint": f"isthmus-{__version__}",
    }


async def _whole(service: Service, chat: ChatRequest) -> Response:
    choices = await service.start_chat(chat)
    answers = [
        {
            "index": piece.index,
            "message": message_of(piece.events),
            "logprobs": _logprobs(service, chat, piece),
            "finish_reason": piece.finish_reason,
        }
        for piece in await whole(choices)
    ]
    head = head_of(service, choices.id, "chat.completion")
    return JSONResponse(head | {"choices": answers} | totals_of(choices, chat.num_choices))


def _logprobs(service: Service, chat: ChatRequest, piece: Piece) -> dict[str, Any] | None:
    return chat_logprobs(piece.tokens, service.tokenizer) if chat.logprobs else None


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """The events of a whole answer as an assistant's message; content is null only beside tool calls."""
    events = joined(events)
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ToolCall):
            calls.append(
                {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
            )
        elif isinstance(event, ToolArguments):
            calls[-1]["function"]["arguments"] += event.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


async def _stream(service: Service, chat: ChatRequest) -> Response:
    choices = await service.start_chat(chat)
    frames = _chunks(service, chat, choices)
    patience_s = 0.0 if chat.return_progress else None
    return await stream_of(choices, frames, service.options.ping_interval_s, patience_s=patience_s)


async def _chunks(service: Service, chat: ChatRequest, choices: Choices) -> AsyncGenerator[bytes, None]:
    """For each choice its role, its events, the reason of its end; then the usage if it was asked for."""
    head = head_of(service, choices.id, "chat.completion.chunk")
    if chat.include_usage:
        head = head | {"usage": None}  # on every chunk but the last, as OpenAI does

    def chunk(
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return frame(head | {"choices": [choice]})

    if chat.return_progress:
        async for slot in choices.progress(lambda: service.engine.stats.slots):
            yield frame(head | {"choices": [], "prompt_progress": _progress(slot, choices)})
    await choices.started()
    for index in range(len(choices.generations)):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for piece in choices.pieces():
        logprobs = _logprobs(service, chat, piece) if piece.tokens else None
        for delta in filter(None, map(delta_of, piece.events)):
            yield chunk(piece.index, delta, logprobs=logprobs)
            logprobs = None
        if piece.finish_reason is not None:
            yield chunk(piece.index, {}, piece.finish_reason, logprobs)
    if chat.include_usage:
        yield frame(head | {"choices": []} | totals_of(choices, chat.num_choices))


def _progress(slot: SlotStats, choices: Choices) -> dict[str, int]:
    """llama-server's object: tokens of the prompt, of these cached, computed so far; and the time so far."""
    passed_s = time.monotonic() - choices.generations[0].timing.added_at
    return {
        "total": slot.num_prompt_tokens,
        "cache": slot.num_cached_tokens,
        "processed": min(slot.num_computed_tokens, slot.num_prompt_tokens),
        "time_ms": round(passed_s * 1e3),
    }


def delta_of(event: Event) -> dict[str, Any]:
    """A tool call is named once, with its index, id and type; then come parts of its arguments.

    Empty for what a stream cannot say: that a call broke.
    """
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCall):
        function = {"name": event.name, "arguments": ""}
        return {
            "tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]
        }
    if isinstance(event, ToolArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {}
