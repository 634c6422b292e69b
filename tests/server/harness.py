"""The real application under uvicorn in a thread, over the scripted engine in a real process."""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import uvicorn
from anthropic import Anthropic
from openai import OpenAI

from isthmus.config import RunOptions
from isthmus.engine.process import EngineProcess
from isthmus.errors import TemplateError, UsageError
from isthmus.server.app import create_app
from isthmus.server.options import ServerOptions
from isthmus.server.run import uvicorn_config
from isthmus.server.service import Service
from isthmus.tokenizer import Segment

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
PATIENCE_S = 30.0  # for events that come in milliseconds on an idle machine


class ByteTokenizer:
    """Token ids are bytes; 256 to 258 are special."""

    SPECIAL: ClassVar = {256: "<s>", 257: "<|turn|>", 258: "</s>"}
    vocab_size = 259
    bos_id, eos_id = 256, 258
    stop_ids = frozenset({258})
    add_bos = True
    strips_leading_space = False
    special_literals = frozenset(SPECIAL.values())

    def special_id(self, literal: str) -> int | None:
        return next((token for token, name in self.SPECIAL.items() if name == literal), None)

    def encode_inside(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_segments(self, segments: list[Segment], *, most: int | None = None) -> list[int]:
        ids: list[int] = []
        for segment in segments:
            text = segment.text
            for token, name in self.SPECIAL.items() if segment.special else ():
                text = text.replace(name, chr(0xE000 + token))
            for char in text:
                ids += [ord(char) - 0xE000] if 0xE000 <= ord(char) < 0xF000 else list(char.encode())
        return ids

    def encode(
        self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None
    ) -> list[int]:
        ids = self.encode_segments([Segment(text, parse_special)])
        return [self.bos_id, *ids] if add_special else ids

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        wrong = next((token for token in ids if token >= self.vocab_size), None)
        if wrong is not None:
            raise UsageError(f"token id {wrong} is outside the vocabulary of {self.vocab_size}")
        shown = [token for token in ids if not (skip_special and self.is_special(token))]
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.SPECIAL[token].encode()

    def token_text(self, token: int) -> str:
        return self.SPECIAL[token] if token in self.SPECIAL else chr(token)

    def is_special(self, token: int) -> bool:
        return token in self.SPECIAL


class PlainTemplate:
    """`<|turn|>role content` for each message. A user who says "fail" has a template that raises.

    While `hold` is clear, a rendering waits for it; `waiting` counts those.
    """

    source = "<|turn|> {{ tools }} <tool_call> </think>"  # tools are Hermes', thoughts in tags

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.waiting = 0
        self.asked: dict[str, Any] = {}  # the last rendering's options

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[Segment]:
        self.asked = kwargs
        if any(message["content"] == "fail" for message in messages):
            raise TemplateError("the template refuses these messages: roles must alternate")
        if not self.hold.is_set():
            self.waiting += 1
            self.hold.wait(PATIENCE_S)
        segments = [Segment("<s>", True)]
        for message in messages:
            segments += [
                Segment(f"<|turn|>{message['role']}\n", True),
                Segment(message["content"] or "", False),
            ]
        return segments

    def close(self) -> None:
        pass


AnyClient = TypeVar("AnyClient", OpenAI, Anthropic)


class Server:
    """`engine` and `log` look behind the server; `url` is its front."""

    def __init__(self, folder: Path, *, gated: bool = False, flags: str = "none", **options: Any) -> None:
        self.log_path = folder / "engine.log"
        self.log_path.touch()
        self._gate_path = folder / "gate"
        self._gate: int | None = None
        if gated or "slow" in flags:
            os.mkfifo(self._gate_path)
            self._gate = os.open(self._gate_path, os.O_RDWR)
        gate = str(self._gate_path) if self._gate is not None else "-"
        command = [sys.executable, str(FAKE_ENGINE), str(self.log_path), gate, flags]
        self.engine = EngineProcess(Path("fake.gguf"), RunOptions(), command=command)
        self.options = ServerOptions(**({"port": 0} | options))
        self.template = PlainTemplate()
        app = create_app(self.engine, ByteTokenizer(), self.template, ("fake", "alias"), self.options)
        self.service: Service = app.state.service
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"{self.options.scheme}://127.0.0.1:{self.port}"
        self._uvicorn = uvicorn.Server(uvicorn_config(app, self.options))
        self._thread = threading.Thread(target=self._run, name="server")
        self._clients: list[OpenAI | Anthropic] = []

    def _run(self) -> None:
        asyncio.run(self._uvicorn.serve(sockets=[self.socket]))

    def start(self) -> None:
        self._thread.start()
        wait_for(lambda: self._uvicorn.started)

    def stop(self) -> None:
        if self._gate is not None:
            self.grant(1000)  # an engine that waits for its next step would be killed only after 2 s
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = False
        self._thread.join(PATIENCE_S)
        for client in self._clients:
            client.close()
        assert not self._thread.is_alive()
        if self._gate is not None:
            os.close(self._gate)

    def wait_ready(self) -> None:
        wait_for(lambda: self.engine.state == "ready")

    def grant(self, steps: int) -> None:
        """Lets a gated engine do this many more steps."""
        assert self._gate is not None
        os.write(self._gate, b"." * steps)

    def log(self) -> list[str]:
        return self.log_path.read_text().splitlines()

    def steps_of(self, request_id: str) -> int:
        return self.log().count(f"step {request_id}")

    def client(self, **options: Any) -> OpenAI:
        return self.closing(
            OpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))
        )

    def closing(self, client: AnyClient) -> AnyClient:
        """The client, closed with the server: collected with an open socket it would fail another test."""
        self._clients.append(client)
        return client


@contextmanager
def serving(folder: Path, *, ready: bool = True, **options: Any) -> Iterator[Server]:
    server = Server(folder, **options)
    server.start()
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.stop()


def wait_for(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Returns once `condition` holds; fails if it never does."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def say(text: str, **script: Any) -> list[dict[str, str]]:
    """Messages that make the scripted engine answer `text`."""
    return [{"role": "user", "content": json.dumps({"say": text} | script)}]


def chat_body(text: str = "ok", *, script: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": say(text, **(script or {}))} | fields


class RawStream:
    """One POST over a plain socket, so that a test sees bytes and leaves when it likes."""

    def __init__(self, server: Server, body: dict[str, Any], *, receive_bytes: int | None = None) -> None:
        """`receive_bytes`: size of the receive buffer, so that unread data soon backs up in the server."""
        data = json.dumps(body).encode()
        self._socket = socket.socket()
        self._socket.settimeout(PATIENCE_S)
        if receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.connect(("127.0.0.1", server.port))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + data)
        self._file = self._socket.makefile("rb")

    def read_until(self, mark: bytes) -> bytes:
        """Everything up to and with the line that contains `mark`."""
        seen = b""
        while mark not in seen:
            line = self._file.readline()
            assert line, f"the stream ended before {mark!r}: {seen!r}"
            seen += line
        return seen

    def read_all(self) -> bytes:
        return self._file.read()

    def leave(self) -> None:
        self._file.close()
        self._socket.close()

    def __enter__(self) -> "RawStream":
        return self

    def __exit__(self, *unused: object) -> None:
        self.leave()
