"""How the server is run: where it listens, who may ask, and the limits on what a request may cost."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from isthmus.config import check_int
from isthmus.errors import UsageError


@dataclass(frozen=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free one
    api_key: str | None = None
    insecure: bool = False  # allows an address that others can reach without a key
    max_queue: int = 32  # requests waiting beside the one that runs; more get 503 and Retry-After
    drain_s: float = 30.0  # after the first SIGTERM, running answers may take this long to end

    max_body_bytes: int = 8 << 20  # of text: about two million tokens
    body_timeout_s: float = 60.0  # for the whole body: a client that dribbles keeps a slot of the queue
    ping_interval_s: float = 15.0  # proxies and clients that give up on a silent stream do so after 30 or 60

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_int("max_queue", self.max_queue, 0, 100_000)
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
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address. A name other than localhost is taken as not."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
