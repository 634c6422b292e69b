"""Checks that come before any route: the Host header, and the API key.

Plain ASGI callables around the application. They look at headers only and pass `receive` and `send` on as
they are, so that a route still sees its client leave (a Starlette BaseHTTPMiddleware would hide that).
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.server.errors import ApiError

_OPEN_PATHS = frozenset(
    {"/health"}
)  # everything else is behind the key: a list of what is open cannot forget
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class HostCheck:
    """Refuses a request whose Host is not this machine's own: 403.

    For a server on a loopback address. It stops DNS rebinding, in which a web page points its own name at
    127.0.0.1 and so speaks to this server from the user's browser.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._allowed = _LOOPBACK_NAMES | {f"[{host}]" if ":" in host else host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host")
            if len(hosts) != 1 or _without_port(hosts[0]) not in self._allowed:
                shown = ", ".join(hosts)[:100]
                message = f"this server answers to localhost only, the Host header says {shown!r}"
                await ApiError(403, message, code="host_not_allowed").response(scope["path"])(
                    scope, receive, send
                )
                return
        await self._app(scope, receive, send)


class KeyCheck:
    """Asks for the API key, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`: 401 without it."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and not self._admits(scope):
            message = "this server needs its API key: send it as 'Authorization: Bearer KEY'"
            error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        """Whether a key was sent, and every key that was sent is the right one."""
        headers = Headers(scope=scope)
        sent = [value.partition(" ") for value in headers.getlist("authorization")]
        keys = [key.strip() if scheme.lower() == "bearer" else "" for scheme, _, key in sent]
        keys += headers.getlist("x-api-key")
        # compare_digest: as long for a nearly right key as for a wrong one. latin-1 is what headers are.
        return bool(keys) and all(hmac.compare_digest(key.encode("latin-1"), self._key) for key in keys)


def _without_port(host: str) -> str:
    """`localhost:8080` -> `localhost`, `[::1]:8080` -> `[::1]`."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
