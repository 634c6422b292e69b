"""Running the application: its signals and its end.

After the first SIGTERM or SIGINT no more connections are taken and running answers may end, for `drain_s` at
most; then their streams get an error and [DONE]. The second ends at once. The exit code is 0 either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from isthmus.engine.process import EngineProcess
from isthmus.engine.request import ModelInfo
from isthmus.errors import IsthmusError, UsageError
from isthmus.server.http11 import Http11
from isthmus.server.options import ServerOptions

# Idle connections live this long: above the 60 s of common proxies, which would else meet a closed one.
_KEEP_ALIVE_S = 65

# A thread that works on a text lets the event loop have the interpreter after so long (Python's own: 5 ms).
_SWITCH_S = 0.0005

# A connection still open this long after its answer was ended is cut.
_CUT_AFTER_S = 5.0


def uvicorn_config(app: FastAPI, options: ServerOptions) -> uvicorn.Config:
    """UsageError if the certificate or its key cannot be read."""
    config = uvicorn.Config(
        app, http=Http11, ws="none", lifespan="on", log_config=None, log_level="warning", access_log=False,
        server_header=False, timeout_keep_alive=_KEEP_ALIVE_S, ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )  # fmt: skip
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(f"--tls-cert {options.tls_cert}, --tls-key {options.tls_key}: {error}") from error
    return config


class _Uvicorn(uvicorn.Server):
    """Without uvicorn's signal handlers, which end the process by the signal instead of with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Runner:
    """One run of the server, from loading to the end of its drain."""

    def __init__(
        self, app: FastAPI, engine: EngineProcess, listener: socket.socket, options: ServerOptions
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._options = options
        self._uvicorn = _Uvicorn(uvicorn_config(app, options))
        self._num_signals = 0
        self._end: asyncio.Task[None] | None = None

    async def run(self, on_loaded: Callable[[ModelInfo | None], None]) -> None:
        """Serves until a signal. `on_loaded` is called once: with the model, or with None if there is none.

        Raises the error that kept the model from loading.
        """
        sys.setswitchinterval(_SWITCH_S)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        try:
            on_loaded(await self._engine.wait_ready())
        except IsthmusError:
            on_loaded(None)
            if self._num_signals == 0:
                self._uvicorn.should_exit = True
                await serving
                raise
        await serving
        if self._uvicorn.force_exit:  # it then leaves the app's lifespan to be cancelled, with a traceback
            await self._uvicorn.lifespan.shutdown()

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._uvicorn.should_exit = True
        if self._num_signals > 1:
            self._engine.kill()
            self._uvicorn.force_exit = True
        else:
            patience_s = self._options.drain_s if self._engine.state == "ready" else 0.0
            self._end = asyncio.create_task(self._end_answers(patience_s))

    async def _end_answers(self, patience_s: float) -> None:
        await asyncio.sleep(patience_s)
        await self._engine.close()
        await asyncio.sleep(_CUT_AFTER_S)
        self._uvicorn.force_exit = True
