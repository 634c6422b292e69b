"""Models as headers: these are real, and no weight is made."""

from __future__ import annotations

import pytest

from isthmus.weights.dummy import DummySource


@pytest.fixture(scope="session")
def deepseek() -> DummySource:
    return DummySource("dummy:deepseek-v3")


@pytest.fixture(scope="session")
def qwen() -> DummySource:
    return DummySource("dummy:qwen3-30b-a3b")


@pytest.fixture
def no_weight_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.weights.dummy._Tensors._bytes", lambda *_: pytest.fail("a weight was made"))
