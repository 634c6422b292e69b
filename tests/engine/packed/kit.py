"""An engine asked with and without a packed cache, and what it packs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams

CACHED, PLAIN = RunOptions(packed_cache=True), RunOptions(packed_cache=False)


def answer(engine: Engine, prompt: str = "abc") -> str:
    engine.add(Request("a", list(prompt.encode()), SamplingParams(temperature=0.0, max_tokens=4)))
    text = b""
    while engine.has_work:
        for event in engine.step():
            if event.error:
                return event.error
            text += bytes([event.token]) if event.token is not None else b""
    return text.decode()


def packed_in_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are packed from here on."""
    from isthmus.modules import loader

    names: list[str] = []
    plain = loader.pack
    monkeypatch.setattr(loader, "pack", lambda raw: (names.append(raw.name), plain(raw))[1])
    return names


def flip(at: int) -> Callable[[Path], None]:
    """Damages one bit of a file."""

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return change
