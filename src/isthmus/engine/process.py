"""The engine in a process of its own, seen from an asyncio program.

Why a process: native calls that release the GIL hundreds of times a token lose it to whatever Python thread
is busy at that moment, and an HTTP server is busy Python. It also means that a fault of the engine ends
requests, not the server: they get an EngineError, and the engine is started again, once. Knows nothing of
text or HTTP.

    loading --Ready--> ready --death--> loading (once) --> ...
       |                                   |
       +--- Failure or death --> failed <--+       close() from any state: closed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from isthmus.config import RunOptions
from isthmus.engine import wire
from isthmus.engine.request import EngineStats, ModelInfo, Output, Request
from isthmus.errors import EngineError, IsthmusError

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "failed", "closed"]
Sink = Callable[[Output | IsthmusError], None]

WORKER = (sys.executable, "-m", "isthmus.engine.worker")

# After the socket is closed the engine ends at its next step; a longer step is not worth waiting for.
_CLOSE_PATIENCE_S = 2.0


class EngineProcess:
    """Starts, feeds, watches and once restarts the engine's process. All methods: event loop thread only.

    `on_progress` gets the weight bytes loaded so far, and all. `command` is the worker to start, to which the
    number of an inherited socket is added.
    """

    def __init__(
        self,
        model: Path,
        options: RunOptions,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        command: Sequence[str] = WORKER,
        max_restarts: int = 1,
    ) -> None:
        self.state: State = "loading"
        self.info: ModelInfo | None = None  # of the last successful load
        self.failure: IsthmusError | None = None  # why the state is "failed"
        self.num_restarts = 0
        self.loaded_bytes = (0, 0)  # of the weights: so far, and in all
        self.stats = EngineStats()  # as of the last step that told
        self.expert_read_rate = 0.0  # bytes of routed experts a second, as of the last steps that read any
        self._start = wire.Start(str(model), options)
        self._on_progress = on_progress
        self._command = tuple(command)
        self._max_restarts = max_restarts
        self._sinks: dict[str, Sink] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._settled = asyncio.Event()  # loaded, failed or closed
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def num_requests(self) -> int:
        """Requests added and not ended."""
        return len(self._sinks)

    def start(self) -> None:
        """Starts the process, unless that has been done; `wait_ready` tells how it went."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def wait_ready(self) -> ModelInfo:
        """The loaded model, or the error that kept it from loading."""
        await self._settled.wait()
        if self.state == "ready" and self.info is not None:
            return self.info
        raise self.failure or EngineError("the engine was closed before its model was loaded")

    def add(self, request: Request, sink: Sink) -> None:
        """Queues a request. `sink` is called with each of its outputs, or once with the error that ends it.

        The last call is an Output with a finish_reason, or an error; none follows `cancel`. `sink` must not
        raise.
        """
        if self.state != "ready":
            raise EngineError(f"the engine is {self.state}; a request needs it ready")
        assert request.id not in self._sinks
        self._send(wire.Add(request))
        self._sinks[request.id] = sink

    def cancel(self, request_id: str) -> None:
        """Ends a request within one step; its sink is not called again. An id that has ended: nothing."""
        if self._sinks.pop(request_id, None) is not None:
            self._send(wire.Cancel(request_id))

    async def close(self) -> None:
        """Ends the process and, with an error, the requests it still has."""
        self.state = "closed"
        self._end_requests(EngineError("the server is shutting down"))
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._settled.set()

    def kill(self) -> None:
        """Ends the process at once and for good; `close` must follow."""
        self.state = "closed"
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _take_stats(self, stats: EngineStats) -> None:
        seconds = stats.expert_seconds - self.stats.expert_seconds
        if seconds > 0:
            self.expert_read_rate = (stats.expert_read_bytes - self.stats.expert_read_bytes) / seconds
        self.stats = stats

    def _send(self, command: wire.Command) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.encode(command))

    async def _supervise(self) -> None:
        while True:
            was_ready, death = await self._run_once()
            if was_ready or self.num_restarts:
                log.error("%s", death)  # a first load that fails is told by wait_ready
            self._end_requests(death)
            if not was_ready or self.num_restarts >= self._max_restarts:
                self.failure, self.state = death, "failed"
                self._settled.set()
                return
            self.num_restarts += 1
            self.stats = EngineStats()
            self.state = "loading"
            self._settled.clear()
            log.warning("starting the engine again (%d of %d)", self.num_restarts, self._max_restarts)

    async def _run_once(self) -> tuple[bool, IsthmusError]:
        """One life of the process: (whether its model was loaded, why it ended)."""
        ours, theirs = socket.socketpair()
        try:
            # Its own process group: Ctrl-C in the terminal is for the HTTP process, which drains first.
            process = await asyncio.create_subprocess_exec(
                *self._command, str(theirs.fileno()), pass_fds=[theirs.fileno()], process_group=0
            )
        except OSError as error:
            ours.close()
            return False, EngineError(f"the engine process could not be started: {error}")
        finally:
            theirs.close()
        self._process = process
        reader, self._writer = await asyncio.open_connection(sock=ours)
        failure: IsthmusError | None = None
        try:
            self._send(self._start)
            failure = await self._read_events(reader)
        finally:
            self._writer.close()
            returncode = await _reap(process)
        return self.state == "ready", failure or EngineError(
            f"the engine process died ({_cause(returncode)}); requests in progress were ended"
        )

    async def _read_events(self, reader: asyncio.StreamReader) -> IsthmusError | None:
        """Hands events on until the process ends; the failure it reported, if it did."""
        failure = None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                length = wire.payload_bytes(await reader.readexactly(4))
                event = wire.decode_event(await reader.readexactly(length))
                if isinstance(event, wire.Outputs):
                    if event.stats is not None:
                        self._take_stats(event.stats)
                    for output in event.outputs:
                        self._deliver(output.request_id, output, last=output.finish_reason is not None)
                elif isinstance(event, wire.Rejected):
                    self._deliver(event.request_id, wire.revive(event), last=True)
                elif isinstance(event, wire.Progress):
                    self.loaded_bytes = (event.done_bytes, event.total_bytes)
                    if self._on_progress is not None:
                        self._on_progress(*self.loaded_bytes)
                elif isinstance(event, wire.Ready):
                    self.info, self.state = event.info, "ready"
                    self._settled.set()
                else:
                    failure = wire.revive(event)
        return failure

    def _deliver(self, request_id: str, event: Output | IsthmusError, *, last: bool) -> None:
        sink = self._sinks.pop(request_id, None) if last else self._sinks.get(request_id)
        if sink is not None:  # else it was cancelled while this event was on its way
            sink(event)

    def _end_requests(self, error: IsthmusError) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(error)


async def _reap(process: asyncio.subprocess.Process) -> int:
    """Exit status of a process whose socket is closed; one that does not notice in time is killed."""
    try:
        return await asyncio.wait_for(process.wait(), _CLOSE_PATIENCE_S)
    except TimeoutError:
        process.kill()
        return await process.wait()


def _cause(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    name = signal.Signals(-returncode).name
    return f"{name}: most likely out of memory" if name == "SIGKILL" else name
