"""`isthmus` in processes of its own, without the 2.5 s that each would take to import torch.

One process, this file as a program, imports what commands need and does nothing else; for each command it
forks. All else is the command's own, as if it had just been started: arguments, environment, folder, standard
files, terminal, signals and end. What reads the environment while it is imported is not prepared
(huggingface_hub). Tests of imports themselves start processes as usual.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREPARED = ("isthmus.cli.main", "isthmus.cli.measure", "isthmus.engine.llm", "isthmus.models.llama", "httpx")
_NUMBER = struct.Struct("i")


class Command:
    """A command that runs, with the part of subprocess.Popen's face that tests use."""

    def __init__(
        self,
        *arguments: str | Path,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        terminal: bool = False,
    ) -> None:
        """stdin, stdout, stderr: descriptors, still the caller's. terminal: stdin controls the command."""
        request = {"arguments": [*map(str, arguments)], "folder": os.getcwd(), "terminal": terminal}
        self._news, news = os.pipe()
        message = json.dumps(request | {"environment": dict(env)}).encode()
        socket.send_fds(_server(), [message], [stdin, stdout, stderr, news])
        os.close(news)
        self.returncode: int | None = None
        self.pid = self._read()

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout_s: float) -> int:
        """The exit code; where a signal ended the command, minus its number. Raises TimeoutError."""
        if (code := self._ended(timeout_s)) is None:
            raise TimeoutError(f"the command does not end within {timeout_s:.0f} s")
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._news], [], [], timeout_s)[0]:
            self.returncode = self._read()
            os.close(self._news)
        return self.returncode

    def _read(self) -> int:
        return int(_NUMBER.unpack(os.read(self._news, _NUMBER.size))[0])


@functools.cache
def _server() -> socket.socket:
    """The way to the process that forks. It ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # else importing numpy starts a thread
            start_new_session=True,  # Ctrl-C on pytest is not for it
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(requests: socket.socket) -> None:
    """Forks for each request; returns in a forked process, which has become what was asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those that wait have ended
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            sys.exit()
        if os.fork() == 0:
            requests.close()
            *standard_files, news = descriptors
            return _become(json.loads(message), standard_files, news)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: dict[str, Any], standard_files: list[int], news: int) -> None:
    """Forks once more: this process says the command's number and how it ended; in the command it returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        for descriptor in standard_files:
            os.close(descriptor)
        os.write(news, _NUMBER.pack(pid))
        status = os.waitpid(pid, 0)[1]
        os.write(news, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    os.close(news)
    for number, descriptor in enumerate(standard_files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["terminal"]:
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C on it is a SIGINT
    # Which whoever runs the tests in the background may have set to be ignored, for all below.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["isthmus", *request["arguments"]]
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    for name in PREPARED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "other threads' locks would be copied as they are"
    gc.collect()
    gc.freeze()  # else the first collection in a command would copy every page with an object on it
    _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.modules["isthmus.cli.main"].main()
