"""Before the server runs: the port is taken, then the engine's process started, and beside it all else made.

This module imports no web framework: what the engine's process has to do is longest, so it starts first.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from isthmus.errors import IsthmusError, UsageError

if TYPE_CHECKING:
    from isthmus.engine.process import EngineProcess
    from isthmus.engine.request import ModelInfo
    from isthmus.server.options import ServerOptions
    from isthmus.server.run import Runner


def listen(options: ServerOptions) -> socket.socket:
    """A listening socket. IsthmusError if the port is taken, UsageError for an address that is not ours."""
    where = f"port {options.port} on {options.host}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UsageError(f"--host {options.host}: {error.strerror}") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"{where} is in use by another program; choose another with --port"
            raise IsthmusError(message) from error
        if error.errno == errno.EACCES:
            raise IsthmusError(f"{where} needs privileges; choose one from 1024 with --port") from error
        raise UsageError(f"cannot listen on {where}: {error.strerror}") from error
    return listener


def base_url(listener: socket.socket, scheme: str = "http") -> str:
    """What OpenAI's clients take as base URL."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"


async def start(
    engine: EngineProcess,
    make_runner: Callable[[], Runner],
    on_loaded: Callable[[ModelInfo | None], None],
) -> None:
    """Starts the engine's process, makes the runner meanwhile, in a thread, and runs it: `Runner.run`.

    What `make_runner` raises is raised too, without waiting for the engine: its process has ended then.
    """
    engine.start()
    try:
        runner = await asyncio.to_thread(make_runner)
    except BaseException:
        engine.kill()  # a process that imports would notice a closed socket only afterwards
        await engine.close()
        raise
    await runner.run(on_loaded)
