"""From the bytes of a request to a validated model, with each way to get it wrong as its own 4xx.

The body is read here and not by FastAPI, because its size, the time it takes and the depth of its JSON are
bounded, and because a client that leaves meanwhile must not count as an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from isthmus.server.errors import ApiError, ClientGone
from isthmus.server.options import ServerOptions
from isthmus.server.unsupported import UNSUPPORTED, refuse_unsupported

ModelT = TypeVar("ModelT", bound=BaseModel)

_MAX_SHOWN = 100  # characters of a bad value in an error message

# JSON becomes Python objects in one piece that nothing can interrupt. Text costs nothing, objects do: a body
# of 16 MB made of "[]," kept the event loop for 9.8 s. These take it under 0.1 s; a conversation of 10,000
# messages has 60,000 objects and keys, a prompt of a million token ids as many commas.
_MAX_OBJECTS = 200_000
_MAX_ITEMS = 1 << 20

# Headers of browsers that programs do not send; the last two of those that posted forms without the others.
_PAGES_SEND = ("origin", "sec-fetch-site", "referer", "cookie")

# Of the request that the running task answers: by it, its text's way is chosen (text_lanes.py).
body_bytes: ContextVar[int] = ContextVar("body_bytes", default=0)


async def read_model(
    request: Request,
    model: type[ModelT],
    options: ServerOptions,
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
) -> ModelT:
    """The body as `model`. ApiError 400, 408, 413 or 415; ClientGone."""
    fields = await read_fields(request, options)
    refuse_unsupported(fields, unsupported)
    return validated(fields, model)


async def read_fields(request: Request, options: ServerOptions, *, typed: bool = True) -> dict[str, Any]:
    """The body as a JSON object that nobody has looked into yet; `typed`: it must say that it is JSON."""
    return parsed(await read_body(request, options, typed=typed))


async def read_body(request: Request, options: ServerOptions, *, typed: bool = True) -> bytes:
    """The body, which has not been looked into. ApiError 408, 413 or 415; ClientGone."""
    _check_type(request, typed)
    try:
        async with asyncio.timeout(options.body_timeout_s):
            body = await _read(request, options.max_body_bytes)
    except TimeoutError:
        message = f"the request body was not complete after {options.body_timeout_s:g} s"
        raise ApiError(408, message, code="request_timeout") from None
    except ClientDisconnect:
        raise ClientGone from None
    body_bytes.set(len(body))
    return body


def validated(fields: dict[str, Any], model: type[ModelT]) -> ModelT:
    """ApiError 400 that names the first field at fault."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _first_error(error) from None


def _check_type(request: Request, typed: bool) -> None:
    """Only application/json: a web page can send other types to this server without asking the browser.

    Not `typed`: a program may leave it out. Browsers name the Origin of whatever a page posts.
    """
    kind = request.headers.get("content-type", "")
    from_page = any(name in request.headers for name in _PAGES_SEND)
    if kind.partition(";")[0].strip().lower() != "application/json" and (typed or from_page):
        message = f"the body must be sent with 'Content-Type: application/json', got {kind[:_MAX_SHOWN]!r}"
        raise ApiError(415, message, code="unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() not in ("identity", ""):
        message = f"the body must be sent as it is, without Content-Encoding, got {coding[:_MAX_SHOWN]!r}"
        raise ApiError(415, message, code="unsupported_content_encoding")


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the request body is larger than {max_bytes} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _check_amount(body: bytes) -> None:
    """ApiError 400 for JSON of more objects than a request has use for; counted outside strings."""
    num_objects = body.count(b"[") + body.count(b"{") + body.count(b":")
    if num_objects <= _MAX_OBJECTS and body.count(b'"') // 2 <= _MAX_ITEMS >= body.count(b","):
        return  # not even with those in strings; what follows takes ten times as long
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_strings = bare.count(b'"') // 2
    outside = b"".join(bare.split(b'"')[::2]) if num_strings <= _MAX_ITEMS else b""
    num_objects = sum(map(outside.count, (b"[", b"{", b":")))
    if num_strings > _MAX_ITEMS or num_objects > _MAX_OBJECTS or outside.count(b",") > _MAX_ITEMS:
        message = f"the body has too many values: {_MAX_OBJECTS} objects and {_MAX_ITEMS} items are the limit"
        raise ApiError(400, message, code="too_many_values")


def parsed(body: bytes) -> dict[str, Any]:
    """ApiError 400 for what is no JSON object, or too much of one."""
    _check_amount(body)
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        # Its messages name line and column, never the content.
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        found = {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}
        what = found.get(type(fields), "a number")
        raise ApiError(400, f"the body must be a JSON object, got {what}", code="invalid_json")
    return fields


def _first_error(error: ValidationError) -> ApiError:
    """The first of pydantic's errors: one clear line helps more than a list."""
    first = error.errors(include_url=False)[0]
    # What concerns several fields has no place; such a check names the one at fault in its context.
    param = _path(first["loc"]) or first.get("ctx", {}).get("param", "")
    message = f"{param}: {first['msg']}" if param else first["msg"]
    value = first["input"]
    if isinstance(value, str | int | float) and first["type"] != "missing":
        message += f", got {repr(value)[:_MAX_SHOWN]}"
    return ApiError(400, message, param=param or None, code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> "messages[0].content"."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
