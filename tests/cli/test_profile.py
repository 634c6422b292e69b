"""`isthmus profile`: every token counts once in every layer, and the plan takes the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Here
from isthmus.config import RunOptions
from isthmus.placement.machine import Machine
from isthmus.placement.plan import plan
from isthmus.placement.profile import Profile
from isthmus.weights.source import open_weights

MODEL = "dummy:qwen3-30b-a3b?layers=2&quant=iq1_s"
TOP_K, EXPERTS = 8, 128


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("The isthmus is narrow: only what is small crosses it. " * 4)
    return file


def test_counts_add_up_and_fit_the_model(tmp_path: Path, here: Here, text: Path) -> None:
    """81 tokens in chunks of 16: the last one is a single row, which could be a decode."""
    file = tmp_path / "profile.json"
    done = here("profile", MODEL, text, "-o", file, "--max-tokens", "81", "--chunk", "16")
    assert done.returncode == 0, done.stderr
    profile = Profile.read(file)
    assert (profile.model, profile.tokens) == (MODEL, 81)
    assert list(profile.counts) == [0, 1]
    for counts in profile.counts.values():
        assert len(counts) == EXPERTS
        assert sum(counts) == 81 * TOP_K
        assert max(counts) <= 81
    plan(Machine.detect(), open_weights(MODEL), RunOptions(strategy="cpu"), profile=profile)


@pytest.mark.parametrize(
    ("model", "content", "says"),
    [
        ("alphabet", "abc", "alphabet has no experts to count"),
        (MODEL, "", "the text is empty"),
        (MODEL, None, "the text cannot be read"),
    ],
)
def test_what_cannot_be_counted_is_said(
    tmp_path: Path, here: Here, alphabet_model: Path, model: str, content: str | None, says: str
) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_text(content)
    done = here("profile", alphabet_model if model == "alphabet" else model, file)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("output", "says"),
    [("no/counts.json", "no/counts.json cannot be written"), (".", "is a folder; give the name of a file")],
)
def test_a_file_that_cannot_be_written_is_said_before_the_model_is_loaded(
    here: Here, tmp_path: Path, output: str, says: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words.")
    done = here("profile", "/no/model.gguf", text, "-o", tmp_path / output)
    assert says in done.stderr
    assert done.returncode == 2
