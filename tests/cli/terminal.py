"""The command line as a user has it: processes, exit codes, and a terminal where one is needed."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cli.forked import Command

COMMAND = [sys.executable, "-c", "from isthmus.cli.main import main; main()"]  # from its very start
TIMEOUT_S = 240.0  # a hang, not a measure


def environment(**changes: str) -> dict[str, str]:
    quiet = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200", "ISTHMUS_HISTORY": "0"}
    return os.environ | quiet | changes


def isthmus(
    *arguments: str | Path, stdin: str | bytes = "", **changes: str
) -> subprocess.CompletedProcess[str]:
    """Runs to the end without a terminal; stdin is a pipe with the given text."""
    (its_in, given), (out, its_out), (err, its_err) = os.pipe(), os.pipe(), os.pipe()
    command = Command(*arguments, env=environment(**changes), stdin=its_in, stdout=its_out, stderr=its_err)
    for end in (its_in, its_out, its_err):
        os.close(end)
    with ThreadPoolExecutor(2) as readers:
        texts = [readers.submit(_read_to_end, end) for end in (out, err)]
        with suppress(BrokenPipeError), open(given, "wb") as pipe:
            pipe.write(stdin.encode() if isinstance(stdin, str) else stdin)
        try:
            code = command.wait(TIMEOUT_S)
        finally:
            command.kill()
    return subprocess.CompletedProcess(arguments, code, *(text.result() for text in texts))


@dataclass
class Terminal:
    """A command with a pseudo-terminal for its input and output."""

    process: Command
    master: int
    seen: str = field(default="")

    @classmethod
    def start(cls, *arguments: str | Path, **changes: str) -> Terminal:
        master, slave = pty.openpty()
        ends = {"stdin": slave, "stdout": slave, "stderr": slave}
        process = Command(*arguments, env=environment(**changes), terminal=True, **ends)
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
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        os.close(self.master)

    def _read(self) -> bytes:
        try:
            return os.read(self.master, 65536)
        except OSError:  # Linux: the last one to have the other end open has closed it
            return b""


def _read_to_end(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8", newline="") as pipe:
        return pipe.read()
