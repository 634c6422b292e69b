"""How the server is run: where it listens, who may ask, and the limits on what a request may cost."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from isthmus.config import MAX_CONTEXT_TOKENS, check_int
from isthmus.errors import UsageError


@dataclass(frozen=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free one
    api_key: str | None = None
    insecure: bool = False  # allows an address that others can reach without a key
    max_queue: int = 32  # requests waiting beside those that run, texts beside those in work; more get 503
    max_model_len: int | None = None  # tokens of prompt and answer of one request; None: the engine's context
    cors_origins: tuple[str, ...] = ()  # pages that may call this server from a browser
    tls_cert: str | None = None  # files of the certificate (chain) and its key, PEM
    tls_key: str | None = None
    tool_parser: str = "auto"  # by the chat template; or the name of one in server/tools, or "none"
    reasoning_parser: str = "auto"  # the same of server/reasoning
    drain_s: float = 30.0  # after the first SIGTERM, running answers may take this long to end

    max_body_bytes: int = 8 << 20  # of text: about two million tokens
    body_timeout_s: float = 60.0  # for the whole body: a client that dribbles keeps a slot of the queue
    ping_interval_s: float = 15.0  # proxies and clients that give up on a silent stream do so after 30 or 60

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_int("max_queue", self.max_queue, 0, 100_000)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2, MAX_CONTEXT_TOKENS)
        for origin in self.cors_origins:
            _check_origin(origin)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("TLS needs both --tls-cert and --tls-key")
        if not 0 <= self.drain_s <= 86_400:  # also false for NaN
            raise UsageError(f"the drain time must be 0 to 86400 seconds, got {self.drain_s}")
        if self.api_key is not None and not (
            self.api_key.isascii() and self.api_key.strip() == self.api_key != ""
        ):
            raise UsageError("an API key is ASCII text without blanks around it, and not empty")
        if not self.is_loopback and self.api_key is None and not self.insecure:
            raise UsageError(
                f"{self.host} can be reached from other machines: give --api-key KEY, or --insecure to let "
                "everybody who reaches this port use the model"
            )

    @property
    def parsers(self) -> tuple[str, str]:
        """Of tool calls and of thoughts."""
        return self.tool_parser, self.reasoning_parser

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert is not None else "http"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address. A name other than localhost is taken as not."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def _check_origin(origin: str) -> None:
    """An origin is scheme://host[:port]; `*` would let every page of the web use the model."""
    parts = urlsplit(origin)
    plain = f"{parts.scheme}://{parts.netloc}" == origin and bool(parts.netloc) and "@" not in parts.netloc
    if not plain or "*" in origin:
        raise UsageError(
            f"a CORS origin is scheme://host or scheme://host:port, as http://localhost:3000; got {origin!r}"
        )
