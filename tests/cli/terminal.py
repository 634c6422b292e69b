"""The command line as a user has it: real processes, real exit codes, and a terminal where one is needed."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

COMMAND = [sys.executable, "-c", "from isthmus.cli.main import main; main()"]
TIMEOUT_S = 120.0  # a hang, not a measure: a command takes some seconds, most of them for importing torch


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200"} | changes


def isthmus(
    *arguments: str | Path, stdin: str | bytes = "", **changes: str
) -> subprocess.CompletedProcess[str]:
    """Runs to the end without a terminal; stdin is a pipe with the given text."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=data,
        capture_output=True,
        timeout=TIMEOUT_S,
        env=environment(**changes),
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@dataclass
class Terminal:
    """A command with a pseudo-terminal for its input and output."""

    process: subprocess.Popen[bytes]
    master: int
    seen: str = field(default="")

    @classmethod
    def start(cls, *arguments: str | Path, **changes: str) -> Terminal:
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(**changes),
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        return cls(process, master)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def press(self, key: str, *, until: str) -> str:
        """Types a key, again every second until `until` has come, as a person would.

        A SIGINT that arrives after the prompt is drawn and before CPython's readline waits for input is
        noticed only with the next key.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while until not in self.seen and time.monotonic() < deadline:
            self.type(key)
            if select.select([self.master], [], [], 1.0)[0]:
                self.seen += self._read().decode(errors="replace")
        return self.expect(until)

    def expect(self, text: str) -> str:
        """Reads until `text` has come; returns what came before it, or fails with what came instead."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            data = self._read() if ready else b""
            assert data, f"no {text!r} came; instead: {self.seen!r}"
            self.seen += data.decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait(self) -> int:
        """The exit code. Output is read away meanwhile, so that the command cannot block on it."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += self._read().decode(errors="replace")
        assert self.process.poll() is not None, f"it does not end; so far: {self.seen!r}"
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)

    def _read(self) -> bytes:
        try:
            return os.read(self.master, 65536)
        except OSError:  # Linux: the last one to have the other end open has closed it
            return b""


def _take_terminal() -> None:
    """Makes the pseudo-terminal the controlling one, so that Ctrl-C on it is a SIGINT.

    Which whoever runs the tests in the background may have set to be ignored, for all below.
    """
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
