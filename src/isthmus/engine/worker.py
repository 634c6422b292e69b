"""The engine's own process: load a model, then step it for whoever holds the other end of the socket.

Started by `EngineProcess` as `python -m isthmus.engine.worker FD`. One thread: commands are read between
steps, so a cancelled request is gone within one step (a decode step or one chunk of a prefill), and an idle
engine sleeps in select. When the other end closes, the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from isthmus.config import RunOptions
from isthmus.engine import wire
from isthmus.engine.request import EngineStats, ModelInfo, Output, Request
from isthmus.errors import IsthmusError

# Twenty reports a second are a smooth bar; one per tensor would be thousands.
_PROGRESS_INTERVAL_S = 0.05

# Statistics go along with outputs, or by themselves while a long prompt is computed, so often at most.
_STATS_INTERVAL_S = 0.1


class Steps(Protocol):
    """What the loop needs of an engine (`isthmus.engine.engine.Engine`, or a scripted one in tests)."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[Output]: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


Report = Callable[[int, int], None]  # bytes loaded so far, bytes in all
MakeEngine = Callable[[Path, RunOptions, Report], Steps]


def load_engine(model: Path, options: RunOptions, progress: Report) -> Steps:
    from isthmus.engine.engine import Engine  # torch: in this process only, and only now

    return Engine(model, options, progress)


def run(sock: socket.socket, make_engine: MakeEngine = load_engine) -> int:
    """Serve the other end of `sock` until it closes; returns the exit code of the process."""
    channel = wire.Channel(sock)
    try:
        start = channel.receive(wait=True)[0]
        if not isinstance(start, wire.Start):
            raise TypeError(f"the first command must be Start, got {type(start).__name__}")
        engine = make_engine(Path(start.model), start.options, _Reporter(channel))
        channel.send(wire.Ready(engine.info))
    except EOFError:
        return 0
    except Exception as error:
        return _fall(channel, error)
    try:
        stats_at = 0.0
        while True:
            _apply(channel, engine, channel.receive(wait=not engine.has_work))
            if not engine.has_work:
                continue
            outputs, now = engine.step(), time.monotonic()
            # The last ones before a rest too: they stand until something happens again.
            stats = engine.stats() if now >= stats_at or not engine.has_work else None
            if stats:
                stats_at = now + _STATS_INTERVAL_S
            if outputs or stats:
                channel.send(wire.Outputs(outputs, stats))
    except EOFError:
        return 0
    except Exception as error:
        return _fall(channel, error)
    finally:
        engine.close()


def _apply(channel: wire.Channel, engine: Steps, commands: list[wire.Command]) -> None:
    for command in commands:
        if isinstance(command, wire.Add):
            try:
                engine.add(command.request)
            except IsthmusError as error:
                channel.send(wire.Rejected(command.request.id, *wire.describe(error)))
        elif isinstance(command, wire.Cancel):
            engine.cancel(command.request_id)


def _fall(channel: wire.Channel, error: Exception) -> int:
    """Say why the process ends. An error of ours, not of the user's, also leaves its traceback on stderr."""
    if not isinstance(error, IsthmusError):
        traceback.print_exception(error)
    with contextlib.suppress(EOFError):
        channel.send(wire.Failure(*wire.describe(error)))
    return error.exit_code if isinstance(error, IsthmusError) else 1


class _Reporter:
    """Sends progress on, not more often than a bar can show."""

    def __init__(self, channel: wire.Channel) -> None:
        self._channel = channel
        self._next_at = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now >= self._next_at or done_bytes == total_bytes:
            self._next_at = now + _PROGRESS_INTERVAL_S
            self._channel.send(wire.Progress(done_bytes, total_bytes))


def main() -> int:
    # The server's log is where a fault of ours is looked for.
    logging.getLogger("isthmus.engine.loop").setLevel(logging.INFO)
    return run(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
