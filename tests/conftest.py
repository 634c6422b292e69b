"""Fixtures that tests of several parts share."""

from pathlib import Path

import pytest

from alphabet import write_alphabet_model


@pytest.fixture(scope="session")
def alphabet_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the model of alphabet.py: each byte is followed by its successor."""
    return write_alphabet_model(tmp_path_factory.mktemp("alphabet") / "alphabet.gguf")
