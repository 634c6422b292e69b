"""Long texts in a process of their own: parsed, rendered and tokenised while the cores have nothing better.

Why a process: what a megabyte of JSON, of markup or of messages costs holds the interpreter's lock, and a
thread that waits for a core while it holds that would hold up everybody. Why two of them: the first one has
only what the others leave (SCHED_IDLE: whoever wakes takes the core from it at once; with nice alone an
engine's thread waited 1 to 4 ms for it, many times a step). Beside busy cores that may be nothing at all:
what takes too long there is done by the second one, whose priority is merely low.

    HTTP process -> this   Begin (once, first), Ask...; closing the socket ends it
    this -> HTTP process   Reply to each, the first one to Begin
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from isthmus.errors import EngineError
from isthmus.server.errors import ApiError

T = TypeVar("T")

WORKER = (sys.executable, "-m", "isthmus.server.text_worker")

_LENGTH = struct.Struct("<I")
_START_S = 120.0  # to read the vocabulary, beside an engine that loads; 1 s for 150,000 tokens alone
_END_S = 0.05  # for an exchange to end by itself

# For a text, and again twice for each megabyte. On a core of its own one takes 0.5 s to be tokenised; in the
# first process 1 to 2 s beside an engine of two threads on two cores, 7 s beside another program too. Prompts
# that somebody waits to be answered are not kept so long from a core.
_IDLE_PATIENCE_S, _IDLE_PATIENCE_FOR_PROMPTS_S, _PATIENCE_S = 5.0, 1.0, 60.0

# For so long work of a kind for which the first process was too slow is not tried there: it starts anew.
_BUSY_S = 60.0


class Begin(msgspec.Struct):
    model: str  # path of the file
    parsers: tuple[str, str]  # of tool calls and of thoughts, as on the command line
    names: tuple[str, ...]  # of the model, for clients
    only_idle: bool  # whether to take only what others leave of the cores


class Ask(msgspec.Struct):
    """`what`: a key of text_work.WORK; `data`: what that takes. for_answer: the engine goes on from it."""

    what: str
    data: bytes
    context_tokens: int | None
    for_answer: bool = False


class Refusal(msgspec.Struct):
    """An ApiError."""

    status: int
    message: str
    param: str | None
    code: str | None
    extra: dict[str, Any]

    @classmethod
    def of(cls, error: ApiError) -> Refusal:
        return cls(error.status, error.message, error.param, error.code, dict(error.extra))

    def error(self) -> ApiError:
        return ApiError(self.status, self.message, param=self.param, code=self.code, extra=self.extra)


class Reply(msgspec.Struct):
    data: bytes = b""
    refusal: Refusal | None = None


def send(sock: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(data)))
    sock.sendall(data)


def receive(sock: socket.socket, kind: type[T], until: float | None = None) -> T:
    """EOFError once the other side is gone; TimeoutError if all of it is not there at `until` (monotonic)."""
    (size,) = _LENGTH.unpack(_read(sock, _LENGTH.size, until))
    return msgspec.msgpack.decode(_read(sock, size, until), type=kind)


def _read(sock: socket.socket, size: int, until: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if until is not None:
            sock.settimeout(max(until - time.monotonic(), 1e-3))
        if not (count := sock.recv_into(view)):
            raise EOFError
        view = view[count:]
    return data


class TextProcess:
    """One of the two, started when first asked. It does one thing at a time, whoever asks."""

    def __init__(self, begin: Begin, command: Sequence[str] = WORKER) -> None:
        self._begin = begin
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False

    @property
    def works(self) -> bool:
        return self._lock.locked()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def ask(self, ask: Ask, patience_s: float) -> bytes:
        """The answer. ApiError, or EngineError if it dies; TimeoutError after which it starts anew."""
        with self._lock:
            if self._is_closed:
                raise EngineError("the server is shutting down")
            if self._process is not None and self._process.poll() is not None:
                self._kill()  # it died while nobody asked, as of want of memory
            sock = self._socket or self._started()
            try:
                reply = _exchange(sock, ask, patience_s)
            except TimeoutError:
                self._kill()
                raise
            except (EOFError, OSError) as error:
                raise EngineError(f"the process for long texts ended (status {self._kill()})") from error
        if reply.refusal is not None:
            raise reply.refusal.error()
        return reply.data

    def close(self) -> None:
        """Ends it for good, and with it what it works on: a server that ends does not wait for that."""
        self._is_closed = True
        while not self._lock.acquire(timeout=_END_S):
            if (process := self._process) is not None:
                process.kill()
        try:
            self._kill()
        finally:
            self._lock.release()

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            # A group of its own, as the engine's: Ctrl-C is for the HTTP process. No session of its own, in
            # which priorities would count for nothing beside ours (autogroup).
            with theirs:  # while we held its end too, nobody would be told that it died
                self._process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())], pass_fds=[theirs.fileno()], process_group=0
                )
            self._socket = ours
            _exchange(ours, self._begin, _START_S)
        except (EOFError, OSError) as error:
            ours.close()
            raise EngineError(f"the process for long texts did not start (status {self._kill()})") from error
        return ours

    def _kill(self) -> int | None:
        process, sock, self._process, self._socket = self._process, self._socket, None, None
        if sock is not None:
            sock.close()
        if process is None:
            return None
        process.kill()
        return process.wait()


class LongTexts:
    """Both processes."""

    idle_patience_s, patience_s = _IDLE_PATIENCE_S, _PATIENCE_S
    idle_patience_for_prompts_s = _IDLE_PATIENCE_FOR_PROMPTS_S

    def __init__(self, begin: Begin, command: Sequence[str] = WORKER) -> None:
        self.idle = TextProcess(msgspec.structs.replace(begin, only_idle=True), command)
        self.low = TextProcess(msgspec.structs.replace(begin, only_idle=False), command)
        self._busy_until: dict[str, float] = {}

    def ask(self, ask: Ask) -> bytes:
        """The answer; ApiError. A prompt does not wait for another text in the first process."""
        size = 1 + 2 * len(ask.data) / (1 << 20)
        patience_s = self.idle_patience_for_prompts_s if ask.for_answer else self.idle_patience_s
        occupied = ask.for_answer and self.idle.works
        if not occupied and time.monotonic() >= self._busy_until.get(ask.what, 0.0):
            try:
                return self.idle.ask(ask, patience_s * size)
            except TimeoutError:
                self._busy_until[ask.what] = time.monotonic() + _BUSY_S
        try:
            return self.low.ask(ask, self.patience_s * size)
        except TimeoutError:
            message = f"the text took longer than {self.patience_s * size:.0f} s, and was given up"
            raise EngineError(message) from None

    def close(self) -> None:
        self.idle.close()
        self.low.close()


def _exchange(sock: socket.socket, message: msgspec.Struct, patience_s: float) -> Reply:
    until = time.monotonic() + patience_s
    sock.settimeout(patience_s)
    send(sock, message)
    return receive(sock, Reply, until)
