"""`isthmus serve` as a user has it: a real process, a real model, the real openai client, real signals."""

import contextlib
import io
import signal
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from harness import wait_for
from openai import OpenAI
from serve_process import Serve, serve


@pytest.fixture(scope="module")
def alphabet(alphabet_model: Path) -> Iterator[Serve]:
    with serve(alphabet_model) as running:
        running.wait_ready()
        yield running


def ask(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_openai_client_chats_with_demo_whole_and_streamed(demo: Serve) -> None:
    with OpenAI(base_url=demo.wait_ready(), api_key="none") as client:
        body = {"model": "demo", "messages": ask("Why is the sky blue?"), "temperature": 0, "max_tokens": 40}
        whole = client.chat.completions.create(**body)
        chunks = list(client.chat.completions.create(**body, stream=True))
    text = whole.choices[0].message.content or ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert "light" in text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40


def test_the_line_it_prints_can_be_pasted(alphabet: Serve) -> None:
    alphabet.wait_ready()
    snippet = alphabet.said[alphabet.said.index("    from openai") :].split("\n\n")[0]
    printed = io.StringIO()
    names: dict[str, OpenAI] = {}
    with contextlib.redirect_stdout(printed):
        exec(textwrap.dedent(snippet), names)  # the alphabet model answers "xyz" to everything
    names["client"].close()
    assert printed.getvalue() == "xyz\n"


def test_model_is_called_by_its_file_name(alphabet: Serve) -> None:
    with OpenAI(base_url=alphabet.wait_ready(), api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["alphabet"]


def test_aliases_come_first(alphabet_model: Path) -> None:
    with serve(alphabet_model, "--alias", "gpt-4o", "--api-key", "sk-1") as running:
        with OpenAI(base_url=running.wait_ready(), api_key="sk-1") as client:
            assert [model.id for model in client.models.list()] == ["gpt-4o", "alphabet"]
        assert "sk-1" not in running.said


def test_torch_lives_in_the_engine_process_alone(alphabet: Serve) -> None:
    alphabet.wait_ready()
    engines = [child for child in alphabet.children() if "isthmus.engine.worker" in command_line(child)]
    assert len(engines) == 1
    assert "libtorch" in Path(f"/proc/{engines[0]}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{alphabet.process.pid}/maps").read_text()


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_engine_ends_when_the_server_is_killed(alphabet_model: Path) -> None:
    with serve(alphabet_model) as running:
        running.wait_ready()
        children = running.children()
        assert children
        running.process.kill()
        wait_for(lambda: not any(alive(child) for child in children))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_first_signal_lets_the_answer_end(alphabet_model: Path) -> None:
    body = {"messages": ask("endless"), "max_tokens": 300, "stream": True}
    with serve(alphabet_model) as running:
        url = running.wait_ready()
        with httpx.stream("POST", f"{url}/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            rest = "\n".join(lines)
        assert running.wait() == 0
    assert '"finish_reason":"length"' in rest
    assert rest.rstrip().endswith("data: [DONE]")
    assert "Traceback" not in running.said


def test_answers_that_outlast_the_drain_end_with_an_error_and_done(alphabet_model: Path) -> None:
    body = {"messages": ask("endless"), "stream": True}
    with serve(alphabet_model, "--drain", "0") as running:
        url = running.wait_ready()
        with httpx.stream("POST", f"{url}/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGINT)
            rest = "\n".join(lines)
        assert running.wait() == 0
    assert '{"error":{"message":"the server is shutting down"' in rest
    assert rest.rstrip().endswith("data: [DONE]")
    assert "Traceback" not in running.said


def test_second_signal_ends_at_once(alphabet_model: Path) -> None:
    body = {"messages": ask("endless"), "stream": True}
    with serve(alphabet_model, "--drain", "3600") as running:
        url = running.wait_ready()
        with httpx.stream("POST", f"{url}/chat/completions", json=body) as answer:
            next(answer.iter_lines())
            running.process.send_signal(signal.SIGTERM)
            wait_for(lambda: refused(url))  # the first has been taken
            running.process.send_signal(signal.SIGTERM)
            assert running.wait() == 0
    assert "Traceback" not in running.said


def refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/models")
    except httpx.TransportError:
        return True
    return False


def failure(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and the one line of a `serve` that does not get to serve."""
    running = Serve(*arguments)
    code = running.wait()
    (line,) = running.said.strip().splitlines()
    return code, line


def test_port_in_use_is_one_line(alphabet_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, line = failure(alphabet_model, "--port", str(port))
    assert code == 1
    assert line == (
        f"error: port {port} on 127.0.0.1 is in use by another program; choose another with --port"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--host", "no.such.host.invalid"], "--insecure"),
        (["--host", "203.0.113.7", "--insecure"], "cannot listen on port 0 on 203.0.113.7"),
        (["--port", "70000"], "port must be a whole number from 0 to 65535"),
        (["--ctx", "100000"], "this model's limit is 4096"),  # found by the engine process
        (["--isa", "neon"], "isa must be one of"),
    ],
)
def test_mistakes_in_the_command_are_exit_code_2(alphabet_model: Path, options: list[str], said: str) -> None:
    code, line = failure(alphabet_model, "--port", "0", *options)
    assert said in line
    assert code == 2


def test_file_that_is_no_model_is_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("<!DOCTYPE html><html>")
    code, line = failure(tmp_path / "model.gguf", "--port", "0")
    assert code == 1
    assert line.startswith("error: ")
