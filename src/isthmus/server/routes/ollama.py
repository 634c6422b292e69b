"""Ollama's `/api/version`, `tags`, `show`, `chat`, `generate` and `ps`: a shim for its own clients.

Answers are lines of JSON; they stream unless the request says otherwise. Names may end in `:latest`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from isthmus.engine.request import MAX_INT
from isthmus.server.body import read_fields, validated
from isthmus.server.errors import ollama_body
from isthmus.server.events import Event, ToolCall
from isthmus.server.generation import Choices, events_of
from isthmus.server.openapi import documented_body
from isthmus.server.protocols import ollama
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.schemas.completions import CompletionRequest
from isthmus.server.schemas.ollama import UNSUPPORTED, GenerateRequest, OllamaChatRequest, ShowRequest
from isthmus.server.service import Service
from isthmus.server.sse import Protocol, line, stream_of, until_gone
from isthmus.server.unsupported import OLD_SAMPLERS, refuse_unsupported

Line = Callable[[list[Event]], dict[str, Any]]


def build(service: Service) -> APIRouter:
    router = APIRouter(prefix="/api")

    @router.head("/version", include_in_schema=False)
    @router.get("/version", operation_id="ollama_version", summary="Version of Ollama's protocol")
    async def version() -> JSONResponse:
        return JSONResponse({"version": ollama.VERSION})

    @router.head("/tags", include_in_schema=False)
    @router.get("/tags", operation_id="ollama_tags", summary="The models served, in Ollama's protocol")
    async def tags() -> JSONResponse:
        return JSONResponse({"models": [_listed(service, name) for name in service.names]})

    @router.get("/ps", operation_id="ollama_ps", summary="The model loaded, in Ollama's protocol")
    async def ps() -> JSONResponse:
        info = service.engine.info
        if info is None or service.engine.state != "ready":
            return JSONResponse({"models": []})
        running = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
        running["context_length"] = service.context_tokens(info)
        return JSONResponse({"models": [_listed(service, service.model_id) | running]})

    @router.post(
        "/show",
        operation_id="ollama_show",
        summary="Facts of a model, in Ollama's protocol",
        openapi_extra=documented_body(ShowRequest),
    )
    async def show(request: Request) -> JSONResponse:
        body = validated(await _fields(service, request), ShowRequest)
        service.check_model(body.model)
        info = service.engine.info
        facts: dict[str, Any] = {}
        if info is not None:
            facts = {
                "general.architecture": info.architecture,
                "general.basename": info.name,
                f"{info.architecture}.context_length": service.context_tokens(info),
            }
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": "",
                "template": service.template.source,
                "details": ollama.details(info),
                "model_info": facts,
                "capabilities": ["completion", "tools"],
            }
        )

    @router.post(
        "/chat",
        operation_id="ollama_chat",
        summary="An answer to a conversation, in Ollama's protocol",
        openapi_extra=documented_body(OllamaChatRequest),
    )
    async def chat(request: Request) -> Response:
        body = validated(await _fields(service, request), OllamaChatRequest)
        if not body.messages:
            service.require(body.model)
            return JSONResponse(ollama.chat_line(service.model_id, []) | ollama.loaded())
        asked = validated(body.chat_fields(), ChatRequest)

        async def answer() -> Response:
            choices = await service.start_chat(asked, "ollama-")
            return await _answer(service, choices, body.streams, _chat_line(service))

        return await until_gone(request.receive, answer())

    @router.post(
        "/generate",
        operation_id="ollama_generate",
        summary="An answer to a prompt, in Ollama's protocol",
        openapi_extra=documented_body(GenerateRequest),
    )
    async def generate(request: Request) -> Response:
        body = validated(await _fields(service, request), GenerateRequest)
        if not body.prompt:
            service.require(body.model)
            return JSONResponse(ollama.generate_line(service.model_id, []) | ollama.loaded())
        start = _start_raw if body.raw else _start_turn

        async def answer() -> Response:
            choices = await start(service, body)
            return await _answer(
                service, choices, body.streams, lambda events: ollama.generate_line(service.model_id, events)
            )

        return await until_gone(request.receive, answer())

    return router


async def _start_raw(service: Service, body: GenerateRequest) -> Choices:
    fields = {"max_tokens": MAX_INT} | body.chat_fields()  # Ollama's answers end where the context does
    return await service.start_completion(validated(fields, CompletionRequest))


async def _start_turn(service: Service, body: GenerateRequest) -> Choices:
    return await service.start_chat(validated(body.chat_fields(), ChatRequest), "ollama-")


async def _fields(service: Service, request: Request) -> dict[str, Any]:
    """The body, with the model by the name that it has here. As at Ollama it need not say that it is JSON."""
    fields = await read_fields(request, service.options, typed=False)
    refuse_unsupported(fields, UNSUPPORTED)
    if isinstance(options := fields.get("options"), dict):
        refuse_unsupported(options, OLD_SAMPLERS)
    name = fields.get("model")
    if isinstance(name, str) and name not in service.names:
        fields["model"] = name.removesuffix(":latest")
    return fields


def _listed(service: Service, name: str) -> dict[str, Any]:
    return ollama.listed(name, service.engine.info, service.created)


def _chat_line(service: Service) -> Line:
    return lambda events: ollama.chat_line(service.model_id, events, ollama.calls_of(events))


async def _answer(service: Service, choices: Choices, streams: bool, write: Line) -> Response:
    if streams:
        protocol = Protocol(
            "application/x-ndjson", line(write([])), b"", lambda error: line(ollama_body(error))
        )
        frames = _lines(choices, write)
        return await stream_of(choices, frames, service.options.ping_interval_s, protocol)
    return JSONResponse(write(await events_of(choices)) | ollama.end(choices))


async def _lines(choices: Choices, write: Line) -> AsyncGenerator[bytes, None]:
    """Calls are whole: their events wait for the end, and so does all that comes after one."""
    held: list[Event] = []
    async for piece in choices.pieces():
        held += piece.events
        if held and not any(isinstance(event, ToolCall) for event in held):
            yield line(write(held))
            held = []
    yield line(write(held) | ollama.end(choices))
