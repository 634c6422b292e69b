"""A command in the process of the tests, where none of its own is needed or something is to be patched."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable

import pytest

from isthmus.cli import measure
from isthmus.cli.main import main

Here = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """As cli.terminal.isthmus."""

    def run(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["isthmus", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(sys.argv, ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def briefly_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slice of decoding after one of reading, and little to read: `bench` without its seconds."""
    monkeypatch.setattr(measure, "MIN_SLICES", 1)
    monkeypatch.setattr(measure, "READ_BYTES", 1 << 20)
