"""The parent's side of the template helper: starts it when first needed, asks it, kills it when it overruns.

A thread cannot be stopped from outside; a process can. One helper serves many renderings and is replaced
after a kill.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import TemplateError
from isthmus.tokenizer.json_lines import decode, encode

_WORKER = Path(__file__).with_name("template_worker.py")
_START_SECONDS = 30.0  # importing jinja2 takes 0.1 s; this allows for a machine busy loading weights
_CLOSE_SECONDS = 0.05  # for a rendering to end by itself
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """What one rendering may take. 512 MiB: the interpreter's 0.1 GiB and room for 16 Mi characters."""

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    output_chars: int = 16 << 20


class TemplateProcess:
    """Thread-safe: renderings wait for each other. `close()`, garbage collection and exit end the helper."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The helper's reply; TemplateError if it takes too long or dies."""
        line = encode(request) + b"\n"
        with self._lock:
            process = self._started()
            try:
                return self._exchange(process, line, self._limits.seconds)
            except TimeoutError:
                self._kill()
                raise TemplateError(
                    f"the chat template took longer than {self._limits.seconds:g} s and was stopped; "
                    "it may loop without end: use another template or raw mode"
                ) from None
            except (EOFError, BrokenPipeError):
                code = self._kill()
                raise TemplateError(f"the chat template ended its helper process (status {code})") from None

    def close(self) -> None:
        """Ends the helper, and with it what is being rendered: a server that ends does not wait for that."""
        while not self._lock.acquire(timeout=_CLOSE_SECONDS):
            if (process := self._process) is not None:
                process.kill()  # whoever asked it gets an error, and lets go of the lock
        try:
            self._kill()
        finally:
            self._lock.release()

    @property
    def pid(self) -> int | None:
        """Of the running helper, or None."""
        return self._process.pid if self._process is not None else None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        limits = self._limits
        # -P keeps this package's directory off sys.path, where its module names could hide others.
        command = [sys.executable, "-P", str(_WORKER)]
        command += [str(limits.seconds), str(limits.memory_bytes), str(limits.output_chars)]
        process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal is for the chat, not for its helper. No session of its own: Linux would
            # give it as much of the cores as all of ours (autogroup), whatever its priority.
            process_group=0,
        )
        self._process, self._stop = process, weakref.finalize(self, _end, process, os.getpid())
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        try:
            self._exchange(process, b"", _START_SECONDS)
        except (TimeoutError, EOFError, BrokenPipeError):
            code = self._kill()
            raise TemplateError(
                f"the helper process for chat templates did not start (status {code})"
            ) from None
        return process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, seconds: float) -> dict[str, Any]:
        """Write `line`, read one line. Both at once, so that no full pipe can hold up the deadline."""
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        unsent, reply = memoryview(line), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if unsent:
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is process.stdout:
                        chunk = os.read(key.fd, _CHUNK_BYTES)
                        if not chunk:
                            raise EOFError
                        reply += chunk
                        continue
                    unsent = unsent[os.write(key.fd, unsent[:_CHUNK_BYTES]) :]
                    if not unsent:
                        selector.unregister(process.stdin)
        return decode(reply)

    def _kill(self) -> int | None:
        code = None
        if self._stop is not None and self._process is not None:
            self._stop()
            code = self._process.returncode
        self._process = self._stop = None
        return code


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a forked child inherits the finaliser, not the helper
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
