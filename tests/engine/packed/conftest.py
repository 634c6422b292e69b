"""A model of its own for each test, and a folder for its caches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def model(tmp_path: Path, alphabet_model: Path) -> Path:
    return Path(shutil.copy(alphabet_model, tmp_path / "model.gguf"))
