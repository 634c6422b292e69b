"""`isthmus serve` over a packed cache that is not what it was: at its start, and under its requests."""

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from serve_process import serve

from isthmus.engine.packed_cache import make_cache
from isthmus.weights.packed_path import cache_path
from isthmus.weights.source import open_weights


@pytest.fixture
def model(tmp_path: Path, alphabet_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With its packed cache."""
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    path = Path(shutil.copy(alphabet_model, tmp_path / "model.gguf"))
    with closing(open_weights(path)) as source:
        make_cache(source)
    return path


def write_into(path: Path) -> None:
    """In place: its size stays."""
    with path.open("r+b") as file:
        file.seek(4096 + 1000)
        file.write(b"x")


def ask(url: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=60)


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (lambda path: os.truncate(path, path.stat().st_size // 2), "it should have"),
    "damaged": (write_into, "the packed cache is damaged in tensor"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_cache_that_is_not_whole_is_told_and_made_again(model: Path, how: str) -> None:
    path, (damage, said) = cache_path(model), DAMAGE[how]
    good = path.read_bytes()
    damage(path)
    with serve(model) as running:
        assert text_of(ask(running.wait_ready())) == "xyz"
        told = [line for line in running.said.splitlines() if str(path) in line]
        assert len(told) == 1
        assert said in told[0]
        assert told[0].endswith("it is made again")
    assert path.read_bytes() == good


def test_one_that_was_asked_for_and_cannot_be_made_ends_the_server(model: Path) -> None:
    path = cache_path(model)
    path.unlink()
    path.mkdir()
    with serve(model, "--packed-cache") as running:
        assert running.wait() == 1
        assert running.said.splitlines()[-1].startswith(f"error: {path} is a folder")
    assert "Traceback" not in running.said


def test_one_that_is_written_to_while_it_serves_ends_requests_by_name(model: Path) -> None:
    with serve(model) as running:
        url = running.wait_ready()
        assert text_of(ask(url)) == "xyz"
        write_into(cache_path(model))
        for _ in range(2):
            refused = ask(url)
            assert refused.status_code == 500
            assert f"{cache_path(model)}: input/output error" in refused.json()["error"]["message"]
    logged = [line for line in running.said.splitlines() if " rows failed: ModelFileError: " in line]
    assert len(logged) == 2
    assert "Traceback" not in running.said
