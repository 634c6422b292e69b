"""`POST /v1/completions`: texts continued, with the prompt and its log-probabilities if asked for.

`echo` with `logprobs` is what evaluations read (lm-eval's loglikelihood): an entry for each token of the
prompt, the first without a value, and one for each token that was generated.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from isthmus.server.body import read_model
from isthmus.server.events import Content
from isthmus.server.generation import Choices, Piece, whole
from isthmus.server.logprobs import ShownToken, prompt_tokens, text_logprobs
from isthmus.server.openapi import documented_body
from isthmus.server.routes.chat_completions import check_stream_options, head_of
from isthmus.server.schemas.completions import CompletionRequest
from isthmus.server.service import Service
from isthmus.server.sse import frame, stream_of, until_gone
from isthmus.server.usage import totals_of


def build(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/completions",
        operation_id="completions",
        summary="Texts continued",
        openapi_extra=documented_body(CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        body = await read_model(request, CompletionRequest, service.options)
        check_stream_options(body)
        answer = _stream if body.stream else _whole
        return await until_gone(request.receive, answer(service, body))

    return router


@dataclass
class _Shown:
    """What of a choice is new: its text, and its tokens if they were asked for."""

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)


class _Writer:
    """Turns pieces into text, with the prompt before the first where it is to be echoed."""

    def __init__(self, service: Service, body: CompletionRequest, choices: Choices) -> None:
        self._service = service
        self._body = body
        self._choices = choices
        self._offsets: dict[int, int] = {}  # characters of each choice that were written

    def write(self, piece: Piece) -> dict[str, Any]:
        """The choice's new text as OpenAI has it."""
        shown = _Shown()
        if self._body.echo and piece.index not in self._offsets:
            shown = self._prompt_of(piece.index)
        if self._body.max_tokens != 0:
            shown.text += "".join(event.text for event in piece.events if isinstance(event, Content))
            shown.tokens += piece.tokens
        offset = self._offsets.get(piece.index, 0)
        self._offsets[piece.index] = offset + len(shown.text)
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = text_logprobs(shown.tokens, self._service.tokenizer, offset)
        return {
            "index": piece.index,
            "text": shown.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }

    def _prompt_of(self, index: int) -> _Shown:
        generation = self._choices.generations[index]
        given = self._body.prompt[index // self._body.num_choices]
        tokenizer = self._service.tokenizer
        text = given if isinstance(given, str) else tokenizer.decode(generation.prompt, skip_special=False)
        if generation.prompt_logprobs is None:
            return _Shown(text)
        tokens = prompt_tokens(generation.prompt, generation.prompt_logprobs, tokenizer)
        if generation.prompt[0] == tokenizer.bos_id and not text.startswith(tokens[0].text):
            tokens[0].text = ""  # it was added, and is not in the text
        return _Shown(text, tokens)


async def _whole(service: Service, body: CompletionRequest) -> Response:
    choices = await service.start_completion(body)
    pieces = await whole(choices)
    writer = _Writer(service, body, choices)
    head = head_of(service, choices.id, "text_completion")
    totals = totals_of(choices, body.num_choices)
    return JSONResponse(head | {"choices": [writer.write(piece) for piece in pieces]} | totals)


async def _stream(service: Service, body: CompletionRequest) -> Response:
    choices = await service.start_completion(body)
    return await stream_of(choices, _chunks(service, body, choices), service.options.ping_interval_s)


async def _chunks(service: Service, body: CompletionRequest, choices: Choices) -> AsyncGenerator[bytes, None]:
    head = head_of(service, choices.id, "text_completion")
    if body.include_usage:
        head = head | {"usage": None}
    writer = _Writer(service, body, choices)
    async for piece in choices.pieces():
        yield frame(head | {"choices": [writer.write(piece)]})
    if body.include_usage:
        yield frame(head | {"choices": []} | totals_of(choices, body.num_choices))
