"""Every error as HTTP: a status, and the body of the protocol: OpenAI's `{"error":
{message, type, param, code}}`, Anthropic's under /v1/messages, Ollama's under /api.

Internal exception text never reaches a client: what is not an ApiError or an IsthmusError is a plain 500, and
the traceback goes to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from isthmus.errors import ContextLengthError, EngineError, IsthmusError, TemplateError, UsageError

log = logging.getLogger(__name__)

_MAX_SHOWN = 200  # characters of a path in an error message

_TYPES = {401: "authentication_error", 403: "permission_error"}


class ApiError(Exception):
    """An answer with an error status. `param` names the field at fault, `extra` goes beside `message`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        self.extra = extra or {}

    @property
    def body(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error | dict(self.extra)}

    def response(self, path: str = "") -> JSONResponse:
        """In the shape of the protocol that `path` belongs to."""
        shape = next((shape for start, shape in _SHAPES.items() if path.startswith(start)), None)
        return JSONResponse(shape(self) if shape else self.body, self.status, self.headers)


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's `{"type": "error", "error": {type, message}}`; what else is known stands beside them."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    known = {"param": error.param, "code": error.code} | dict(error.extra)
    details = {name: value for name, value in known.items() if value is not None}
    return {"type": "error", "error": {"type": kind, "message": error.message} | details}


def ollama_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_SHAPES: dict[str, Callable[[ApiError], dict[str, Any]]] = {
    "/v1/messages": anthropic_body,
    "/api/": ollama_body,
}


class ClientGone(Exception):
    """The client left before its answer was complete; nobody reads what is sent now."""


def unavailable(message: str, code: str, retry_after_s: int) -> ApiError:
    """503: the same request may work later."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def model_not_found(name: str, served: str) -> ApiError:
    message = f"the model {name[:100]!r} is not served here; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def internal_error() -> ApiError:
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def from_isthmus(error: IsthmusError) -> ApiError:
    """The HTTP meaning of an error of the package: the client's to repair (400) or ours (500)."""
    if isinstance(error, ContextLengthError):
        extra = {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.context_tokens}
        return ApiError(400, str(error), param="messages", code="context_length_exceeded", extra=extra)
    if isinstance(error, TemplateError):
        return ApiError(400, str(error), param="messages", code="chat_template_error")
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    log.error("unexpected error of a request", exc_info=error)
    return internal_error()


def as_api_error(error: Exception) -> ApiError:
    """Any exception; one that is a fault of ours is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, IsthmusError):
        return from_isthmus(error)
    log.error("fault in a request", exc_info=error)
    return internal_error()


def install(app: FastAPI) -> None:
    """Makes every error of `app`, also its own 404 and 405, leave in the shape above."""

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"[:_MAX_SHOWN]
        message = {
            404: f"{where} does not exist here; the endpoints are listed in /openapi.json",
            405: f"{where} is not allowed",
        }.get(error.status_code, str(error.detail))
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, message, code=code, headers=error.headers).response(
            request.url.path
        )

    async def known_error(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    async def fault(request: Request, error: Exception) -> Response:
        return internal_error().response(request.url.path)  # Starlette raises it again for the log

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nginx's "client closed request"; never arrives anywhere

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ApiError, known_error)
    app.add_exception_handler(IsthmusError, known_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(Exception, fault)
