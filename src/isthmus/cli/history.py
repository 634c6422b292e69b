"""What was typed in chats, kept for the next one: arrow-up brings it back, as in a shell.

A file of plain lines that only its user can read. Not readline's own file: two libraries go by that name,
whose files differ, and with a rewritten one the last of two chats would win. Here each appends its lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from isthmus.config import cache_dir
from isthmus.errors import UsageError


def with_line_editing(most: int) -> Callable[[str], None]:
    """Gives `input` its line editing, with the last `most` lines of former chats; returns what keeps a line.

    Nothing is kept where nobody types, where most is 0, and where it cannot be: a chat is possible without.
    """
    try:
        import readline
    except ImportError:  # not every Python has it
        return _forget
    if most == 0 or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _forget
    try:
        history = History(cache_dir() / "chat_history", most)
    except (OSError, UsageError):
        return _forget
    for line in history.lines:
        with suppress(ValueError):  # a character that the terminal's encoding has not
            readline.add_history(line)
    return history.keep


class History:
    """`lines`: the last `most` of the file, as it was when this was made."""

    def __init__(self, path: Path, most: int) -> None:
        """Raises OSError."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b", opener=_private) as file:
            os.fchmod(file.fileno(), 0o600)
            file.seek(0)
            lines = [line for line in file.read().decode("utf-8", "surrogateescape").split("\n") if line]
            self.lines = lines[-most:]
            if len(lines) > most:  # cut in place: what another chat appends meanwhile stays
                file.truncate(0)
                file.write(_encoded(self.lines))
        self._last = self.lines[-1] if self.lines else ""

    def keep(self, line: str) -> None:
        """Appends a line that is neither blank nor the last one again, as readline does.

        What the disk does not take is not there next time.
        """
        if line.strip() and line != self._last and "\0" not in line:
            self._last = line
            with suppress(OSError), open(self._path, "ab", opener=_private) as file:
                file.write(_encoded([line]))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _encoded(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")


def _forget(line: str) -> None:
    pass
