"""`isthmus serve` as a process."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import wait_for

COMMAND = [sys.executable, "-c", "from isthmus.cli.main import main; main()", "serve"]
PATIENCE_S = 180.0  # a hang, not a measure
READY = re.compile(r"is ready at (\S+)")


class Serve:
    """A running `isthmus serve`; `said` is its stderr so far."""

    def __init__(self, *arguments: str | Path) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TERM": "dumb", "NO_COLOR": "1"},
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.said += line

    def wait_ready(self) -> str:
        """The base URL."""
        wait_for(lambda: READY.search(self.said) or self.process.poll() is not None, PATIENCE_S)
        found = READY.search(self.said)
        assert found, self.said
        wait_for(lambda: "print(answer" in self.said)
        return found[1]

    def wait(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def serve(*arguments: str | Path) -> Iterator[Serve]:
    running = Serve(*arguments, "--port", "0")
    try:
        yield running
    finally:
        running.process.kill()
        running.wait()
