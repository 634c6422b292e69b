"""The line about what was loaded, and the one that is written over while something takes long."""

import io
import sys
import time
from dataclasses import replace

import pytest

from isthmus.cli.load import describe, status
from isthmus.engine.request import ModelInfo

INFO = ModelInfo("m", "qwen3moe", 9, 4096, "amx", 8, 20_000_000_000, 1, 10.0)


def test_on_the_cpu_alone_it_names_no_device() -> None:
    assert describe(INFO).endswith("context 4096 tokens, amx, 8 threads")


def test_several_requests_share_a_cache() -> None:
    several = replace(INFO, parallel=8, kv_tokens=16384)
    assert "context 4096 tokens (8 requests share a cache of 16384), amx" in describe(several)


def test_devices_are_named_with_what_they_took_and_how_experts_are_handed_over() -> None:
    split = replace(
        INFO,
        strategy="hybrid",
        devices={"cuda:0": "RTX 4090", "cuda:1": "RTX 3090"},
        device_bytes={"cuda:0": 9_500_000_000, "cuda:1": 8_000_000_000},
        handoff="stream_memops",
    )
    assert describe(split).endswith(
        "8 threads; hybrid on cuda:0 (RTX 4090, 9.50 GB), cuda:1 (RTX 3090, 8.00 GB), experts handed over by "
        "stream_memops"
    )
    on_cpu = replace(INFO, strategy="hybrid", handoff="threaded")
    assert describe(on_cpu).endswith("8 threads; hybrid, experts handed over by threaded")


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_status_line_has_the_time_since_and_is_wiped_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", Tty())
    with status() as show:
        show("first")
        now[0] += 0.1
        show("too soon after it")
        now[0] += 65.0
        show("later")
    lines = sys.stderr.getvalue().split("\r\x1b[K")  # type: ignore[attr-defined]
    assert lines == ["", "    0 s  first", "   65 s  later", ""]


def test_without_a_terminal_there_is_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with status() as show:
        show("first")
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
