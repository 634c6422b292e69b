"""pull, list, rm, and the names they give to every other command, against a hub in a thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hub_server import Recorded, hub_server
from isthmus.cli.main import app
from isthmus.errors import HubError, UsageError
from isthmus.resolve import resolve_model
from models import tiny

REPO = "owner/Tiny-GGUF"
NAME = f"{REPO}:Q4_K_M"

Isthmus = Callable[..., Result]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """A repository with the same tiny model under two names."""
    case = tiny.CASES["qwen3moe"]
    data = tiny.write_case(tmp_path / "model.gguf", case, tiny.build(case)).read_bytes()
    files = {"Tiny-Q4_K_M.gguf": data, "Tiny-Q8_0.gguf": data}
    with hub_server(Recorded({REPO: files})) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)  # as HF_ENDPOINT at the start
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
        yield server


@pytest.fixture
def isthmus() -> Isthmus:
    return lambda *words, **keywords: CliRunner().invoke(app, list(words), **keywords)


def test_pull_says_what_it_takes_then_downloads_and_every_command_knows_the_name(
    hub: Recorded, isthmus: Isthmus
) -> None:
    done = isthmus("pull", NAME, "-y")
    assert done.exit_code == 0, done.output
    assert "decode tok/s" in done.stderr
    assert "download: 1 file" in done.stderr
    path = Path(done.stdout.strip())
    assert path.name == "Tiny-Q4_K_M.gguf"
    assert resolve_model(NAME) == path == resolve_model(REPO)
    listed = json.loads(isthmus("list", "--json").stdout)["models"]
    assert [(one["name"], one["bytes"], one["path"]) for one in listed] == [
        (NAME, path.stat().st_size, str(path))
    ]
    asked = len(hub.requests)
    assert NAME in isthmus("list").stdout
    assert json.loads(isthmus("plan", NAME, "--json").stdout)["model"]["nbytes"] > 0
    assert len(hub.requests) == asked  # what is here needs no network


def test_nobody_to_ask_is_an_error_before_the_first_byte(hub: Recorded, isthmus: Isthmus) -> None:
    done = isthmus("pull", NAME)
    assert isinstance(done.exception, UsageError)
    assert "say -y" in str(done.exception)
    assert not any("resolve" in request and "bytes=0-" in request for request in hub.requests)
    with pytest.raises(UsageError, match=f"{NAME} is not downloaded: isthmus pull {NAME} does that"):
        resolve_model(NAME)


def test_a_wrong_quantisation_lists_those_there_are(hub: Recorded, isthmus: Isthmus) -> None:
    error = isthmus("pull", f"{REPO}:Q4_K_S", "-y").exception
    assert isinstance(error, UsageError)
    assert "did you mean Q4_K_M" in str(error)
    assert "Q8_0" in str(error)


def test_rm_takes_one_or_all(hub: Recorded, isthmus: Isthmus) -> None:
    for quant in ("Q4_K_M", "Q8_0"):
        assert isthmus("pull", f"{REPO}:{quant}", "-y").exit_code == 0
    assert isthmus("rm", NAME, "-y").exit_code == 0
    names = [one["name"] for one in json.loads(isthmus("list", "--json").stdout)["models"]]
    assert names == [f"{REPO}:Q8_0"]
    error = isthmus("rm", NAME, "-y").exception
    assert isinstance(error, UsageError)
    assert "is not here" in str(error)
    assert isinstance(isthmus("rm", REPO).exception, UsageError)  # nobody to ask
    assert isthmus("rm", REPO, "-y").exit_code == 0
    assert "no models in" in isthmus("list").stdout


def test_without_a_network_it_says_so(isthmus: Isthmus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    error = isthmus("pull", "owner/Other-GGUF:Q8_0", "-y").exception
    assert isinstance(error, HubError)
    assert "cannot be reached" in str(error)
