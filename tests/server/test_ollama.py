"""The ollama client against `/api`, and the lines of its streams."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from harness import Server, serving, wait_for

SAY = json.dumps({"say": "Hello there"})
MESSAGES = [{"role": "user", "content": SAY}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


@pytest.mark.parametrize("name", ["fake", "fake:latest", "alias"])
def test_chat(client: ollama.Client, name: str) -> None:
    answer = client.chat(model=name, messages=MESSAGES)
    assert answer.message.content == "Hello there"
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "stop", 11)
    assert answer.prompt_eval_count is not None
    assert answer.total_duration is not None


def test_chat_streams(client: ollama.Client) -> None:
    parts = list(client.chat(model="fake", messages=MESSAGES, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Hello there"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 11


def test_async_client(server: Server) -> None:
    async def ask() -> str | None:
        async with ollama.AsyncClient(host=server.url) as client:
            return (await client.chat(model="fake", messages=MESSAGES)).message.content

    assert asyncio.run(ask()) == "Hello there"


def test_generate_is_a_turn_or_with_raw_a_text(client: ollama.Client) -> None:
    turn = client.generate(model="fake", prompt=SAY, system="Be kind")
    raw = client.generate(model="fake", prompt=SAY, raw=True)
    assert turn.response == raw.response == "Hello there"
    assert raw.prompt_eval_count == 1 + len(SAY)
    assert turn.prompt_eval_count is not None
    assert turn.prompt_eval_count > raw.prompt_eval_count


def test_options(client: ollama.Client) -> None:
    options = {"num_predict": 3, "temperature": 0, "seed": -1, "num_ctx": 4096, "top_k": 40}
    answer = client.chat(model="fake", messages=MESSAGES, options=options)
    assert (answer.message.content, answer.done_reason) == ("Hel", "length")
    assert client.generate(model="fake", prompt=SAY, options={"stop": ["there"]}).response == "Hello "


def test_request_without_a_prompt_loads(client: ollama.Client) -> None:
    assert client.generate(model="fake").done_reason == "load"
    assert client.chat(model="fake", messages=[]).done_reason == "load"


def test_models(client: ollama.Client, server: Server) -> None:
    assert [model.model for model in client.list().models] == ["fake", "alias"]
    (running,) = client.ps().models
    assert running.model == "fake"
    assert running.context_length == 2048
    shown = client.show("fake")
    assert shown.modelinfo == {
        "general.architecture": "fake",
        "general.basename": "fake",
        "fake.context_length": 2048,
    }
    assert shown.template == server.template.source
    version = httpx.get(f"{server.url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "what clients ask for"


def test_stream_is_lines_of_json_and_slow_prefill_sends_empty_ones(tmp_path) -> None:
    with serving(tmp_path, gated=True, ping_interval_s=0.02) as server:
        content = json.dumps({"say": "x", "prefill": 2})
        given = {"model": "fake", "messages": [{"role": "user", "content": content}]}
        with httpx.stream("POST", f"{server.url}/api/chat", json=given) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            lines = answer.iter_lines()
            first = json.loads(next(lines))
            assert (first["message"]["content"], first["done"]) == ("", False)
            server.grant(4)
            assert json.loads(list(lines)[-1])["done"] is True


def test_client_that_leaves_ends_the_work(gated: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{gated.url}/api/generate", json={"model": "fake", "prompt": SAY}, timeout=0.3)
    wait_for(lambda: gated.engine.num_requests == 0)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}),
        ("chat", {"messages": 7}),
        ("chat", {"options": {"temperature": -1}}),
        ("chat", {"options": {"seed": -2}}),
        ("chat", {"options": {"mirostat": 2}}),
        ("generate", {"options": {"typical_p": 0.5}}),
        ("chat", {"stream": "no"}),
        ("generate", {"prompt": 7}),
        ("generate", {"suffix": "x"}),
        ("generate", {"images": ["aGk="]}),
        ("generate", {"context": [1, 2]}),
        ("generate", {"prompt": "x" * 5000}),
        ("show", {"model": 7}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_input_has_ollamas_shape(server: Server, client: ollama.Client, path: str, fields: Any) -> None:
    given = {"model": "fake", "messages": MESSAGES, "prompt": SAY} | fields
    answer = httpx.post(f"{server.url}/api/{path}", json=given)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    assert isinstance(answer.json()["error"], str)
    assert client.chat(model="fake", messages=MESSAGES).message.content == "Hello there"


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "application/x-www-form-urlencoded"}])
def test_a_program_need_not_say_that_it_sends_json(server: Server, headers: dict[str, str]) -> None:
    """LiteLLM's Ollama providers name no type, `curl -d` a form's."""
    message = {"role": "user", "content": SAY, "images": []}
    sent = {"model": "fake", "messages": [message], "options": {"num_predict": 24}, "stream": False}
    answer = httpx.post(f"{server.url}/api/chat", content=json.dumps(sent), headers=headers)
    assert answer.json()["message"]["content"] == "Hello there"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://127.0.0.1:3000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Referer": "http://evil/"},
        {"Cookie": "a=b"},
    ],
)
@pytest.mark.parametrize("kind", [{}, {"Content-Type": "text/plain"}])
def test_a_page_must(server: Server, headers: dict[str, str], kind: dict[str, str]) -> None:
    """Without application/json a browser would not ask first whether that page may."""
    sent = json.dumps({"model": "fake", "messages": MESSAGES})
    answer = httpx.post(f"{server.url}/api/chat", content=sent, headers=headers | kind)
    assert (answer.status_code, set(answer.json())) == (415, {"error"})


def test_unknown_model_and_path(server: Server, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(model="llama3", messages=MESSAGES)
    assert caught.value.status_code == 404
    assert "not served here" in caught.value.error
    assert set(httpx.get(f"{server.url}/api/pull").json()) == {"error"}
