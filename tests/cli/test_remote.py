"""`isthmus run --url` and `isthmus chat --url`: a running server answers."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.terminal import Terminal, isthmus

sys.path.append(str(Path(__file__).parent.parent / "server"))
from harness import Server, serving

SCRIPT = '{"say": "out of the server"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("remote"), api_key="sk-1") as running:
        yield running


def ask(server: Server, *arguments: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    return isthmus("run", "--url", url or server.url, "--api-key", "sk-1", *arguments)


def test_run_prints_the_answer_and_its_speed(server: Server) -> None:
    done = ask(server, SCRIPT)
    assert (done.returncode, done.stdout) == (0, "out of the server\n")
    assert "17 tokens at" in done.stderr


def test_model_may_be_named_and_parameters_are_sent(server: Server) -> None:
    done = ask(server, "alias", SCRIPT, "--max-tokens", "3", url=f"{server.url}/v1/")
    assert (done.returncode, done.stdout) == (0, "out\n")


def test_raw_continues_a_text(server: Server) -> None:
    assert ask(server, "--raw", SCRIPT).stdout == "out of the server\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["gpt", "hi"], 2, "has no model 'gpt'; it has fake, alias"),
        (["--api-key", "sk-2", "hi"], 1, "the server says (401)"),
        (["--url", "http://127.0.0.1:9", "hi"], 1, "cannot be reached"),
        (["--url", "localhost", "hi"], 2, "must begin with http"),
        (["x" * 5000], 1, "the server says (400): the prompt has"),
    ],
)
def test_what_goes_wrong_is_one_line(server: Server, arguments: list[str], code: int, said: str) -> None:
    done = ask(server, *arguments)
    assert said in done.stderr
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1)


def test_neither_model_nor_url() -> None:
    done = isthmus("run", stdin="hi")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--url" in done.stderr


def test_chat(server: Server) -> None:
    terminal = Terminal.start("chat", "--url", server.url, "--api-key", "sk-1")
    try:
        terminal.expect(">>> ")
        terminal.type(SCRIPT + "\n")
        terminal.expect("out of the server")
        terminal.expect(">>> ")
        terminal.type("/stats\n")
        terminal.expect("of 2048 tokens of context")
        terminal.expect(">>> ")
        terminal.type("/bye\n")
        assert terminal.wait() == 0
    finally:
        terminal.close()
