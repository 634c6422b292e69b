"""Messages between the HTTP process and the engine process, and how they are framed.

A frame is its length (4 bytes, little endian) and one msgpack message: one of the structs below, told apart
by their tag. Requests and outputs travel as the engine's own types, so there is no second definition of them.
No pickle: nothing that arrives can be more than data. No torch, no asyncio.

    HTTP process -> engine   Start (once, first), Add, Cancel; closing the socket ends the engine
    engine -> HTTP process   Progress..., then Ready or Failure; Outputs, Rejected; Failure before a fall
"""

from __future__ import annotations

import select
import socket
import struct
from typing import TypeAlias

import msgspec

from isthmus import errors
from isthmus.config import RunOptions
from isthmus.engine.request import EngineStats, ModelInfo, Output, Request

_LENGTH = struct.Struct("<I")

# A prompt of 2^24 tokens (the largest context there is) at 3 bytes each, with room to spare.
MAX_FRAME_BYTES = 64 << 20

_RECEIVE_BYTES = 1 << 16


class Start(msgspec.Struct, tag=True):
    model: str
    options: RunOptions


class Add(msgspec.Struct, tag=True):
    request: Request


class Cancel(msgspec.Struct, tag=True):
    request_id: str


class Progress(msgspec.Struct, tag=True):
    """Weight bytes loaded so far, of all."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, tag=True):
    info: ModelInfo


class Outputs(msgspec.Struct, tag=True):
    """What one step gave, in order. `stats`: as of its end, a few times a second and before a rest."""

    outputs: list[Output]
    stats: EngineStats | None = None


class Failure(msgspec.Struct, tag=True):
    """The model could not be loaded, or a step failed for all requests; the process ends after it.

    `kind` is the name of a class in errors.py, `numbers` its counted attributes.
    """

    kind: str
    message: str
    numbers: dict[str, int] = {}


class Rejected(msgspec.Struct, tag=True):
    """The engine refused a request; fields as in Failure."""

    request_id: str
    kind: str
    message: str
    numbers: dict[str, int] = {}


Command: TypeAlias = Start | Add | Cancel
Event: TypeAlias = Progress | Ready | Outputs | Failure | Rejected

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_event_decoder = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """One frame."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise errors.EngineError(
            f"a message of {len(payload)} bytes exceeds the {MAX_FRAME_BYTES} of a frame"
        )
    return _LENGTH.pack(len(payload)) + payload


def decode_event(payload: bytes) -> Event:
    return _event_decoder.decode(payload)


def payload_bytes(head: bytes) -> int:
    """Length of the payload that follows the 4 bytes `head`; EngineError beyond the limit of a frame."""
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise errors.EngineError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return int(length)


def describe(error: BaseException) -> tuple[str, str, dict[str, int]]:
    """(kind, message, numbers) of an exception, for Failure and Rejected."""
    if isinstance(error, errors.IsthmusError):
        numbers = {name: value for name, value in vars(error).items() if isinstance(value, int)}
        return type(error).__name__, str(error), numbers
    return "EngineError", f"{type(error).__name__}: {error}", {}


def revive(message: Failure | Rejected) -> errors.IsthmusError:
    """The exception that `describe` took apart; an unknown kind is an EngineError."""
    kind = getattr(errors, message.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.IsthmusError)):
        kind = errors.EngineError
    error = kind(message.message)
    vars(error).update(message.numbers)
    return error


class Channel:
    """The engine's end of the socket: blocking, one thread. EOFError once the other side is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(True)
        self._arrivals = select.poll()  # not select.select, which has no descriptors from 1024 on
        self._arrivals.register(sock, select.POLLIN)
        self._buffer = bytearray()

    def close(self) -> None:
        self._sock.close()

    def send(self, event: Event) -> None:
        try:
            self._sock.sendall(encode(event))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the HTTP process is gone") from error

    def receive(self, *, wait: bool) -> list[Command]:
        """The commands that have arrived; with `wait` at least one."""
        commands: list[Command] = []
        while self._readable(wait=wait and not commands):
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                raise EOFError("the HTTP process is gone")
            self._buffer += data
            commands += self._take()
        return commands

    def _readable(self, *, wait: bool) -> bool:
        return bool(self._arrivals.poll(None if wait else 0))

    def _take(self) -> list[Command]:
        commands = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + payload_bytes(bytes(self._buffer[: _LENGTH.size]))
            if len(self._buffer) < end:
                break
            commands.append(_command_decoder.decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return commands
