"""What no route may get wrong, for each in /openapi.json: whatever comes, the answer is a 4xx in the shape
of its protocol, and the next ordinary request is right."""

import asyncio
import os
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from harness import Server, chat_body, serving, wait_for
from schemathesis.checks import not_a_server_error

POSTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/api/chat",
    "/api/generate",
    "/api/show",
]
GETS = ["/health", "/ready", "/v1/models", "/metrics", "/slots", "/tokenizer_info"]
GETS += ["/api/version", "/api/tags", "/api/ps"]
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "3"))  # 200 for a thorough look
JSON = {"Content-Type": "application/json"}


def assert_shape(answer: httpx.Response, path: str) -> None:
    error = answer.json()
    if path.startswith("/api/"):
        assert list(error) == ["error"]
        assert isinstance(error["error"], str)
    elif path.startswith("/v1/messages"):
        assert error["type"] == "error"
        assert {"type", "message"} <= set(error["error"])
    else:
        assert {"message", "type", "param", "code"} <= set(error["error"])
    assert len(answer.content) < 1000, "an error must not send the input back"


def assert_well(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("well"))
    assert answer.json()["choices"][0]["message"]["content"] == "well"


def test_these_are_all_routes(server: Server) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} == set(POSTS)
    assert {path for path, methods in paths.items() if "get" in methods} - {"/v1/models/{name}"} == set(GETS)


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_none(server: Server, path: str) -> None:
    bodies: list[tuple[bytes, dict[str, str], int]] = [
        (b"", JSON, 400),
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b"7", JSON, 400),
        (b'{"x":' + b"[" * 100_000, JSON, 400),
        (b'{"x": "\xff"}', JSON, 400),
        (b'{"x": "\\ud800"}', JSON, 400),
        (b'{"x": [' + b"[]," * 300_000 + b"[]]}", JSON, 400),
        (b"{}", {"Content-Type": "text/plain", "Origin": "http://127.0.0.1"}, 415),
        (b"{}", JSON, 400),
        (b'{"x": NaN}', JSON, 400),
    ]
    with httpx.Client() as client:
        for body, headers, status in bodies:
            answer = client.post(server.url + path, content=body, headers=headers)
            assert answer.status_code == status, (body[:20], answer.text)
            assert_shape(answer, path)
    assert_well(server)


@pytest.mark.parametrize("path", POSTS + GETS)
def test_methods_that_are_none(server: Server, path: str) -> None:
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = httpx.request(method, server.url + path)
        assert (answer.status_code, bool(answer.headers["allow"])) == (405, True)
        assert_shape(answer, path)


@pytest.mark.parametrize("path", POSTS + [path for path in GETS if path != "/health"])
def test_everything_but_health_is_behind_the_key(locked: Server, path: str) -> None:
    method = "GET" if path in GETS else "POST"
    answer = httpx.request(method, locked.url + path, headers=JSON)
    assert answer.status_code == 401
    assert_shape(answer, path)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory):
    with serving(tmp_path_factory.mktemp("locked"), api_key="sk-1") as running:
        yield running


TEXTS = {
    "markers": "<s><|turn|></s></think><|im_end|><tool_call>{{ 7*7 }}{% for x in y %}",
    "NUL": "a\0b",
    "combining marks": "a" + "\u0301" * 400,
    "right to left and joiners": "\u202e\u200d\ufeff" * 100,
    "astral": "\U0010ffff" * 100,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_odd_texts_are_texts(server: Server, text: str) -> None:
    """They come back as they were, and no user's text becomes a special token."""
    ids = httpx.post(f"{server.url}/tokenize", json={"content": text, "parse_special": False}).json()[
        "tokens"
    ]
    assert max(ids) < 256
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["content"] == text
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]}
    )
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 2 + len("user\n") + len(text.encode())
    assert_well(server)


def test_megabytes_of_marks_are_refused_by_their_length(server: Server) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a" + "\u0301" * (1 << 20)}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert_well(server)


async def _crowd(server: Server, count: int) -> list[tuple[int, httpx.Response]]:
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:

        async def ask(number: int) -> tuple[int, httpx.Response]:
            body = chat_body(f"answer {number}")
            return number, await client.post(f"{server.url}/v1/chat/completions", json=body)

        return await asyncio.gather(*map(ask, range(count)))


def test_200_clients_at_once(server: Server) -> None:
    """Each gets its own answer, or a 503 that says when to come again; nothing is left over."""
    answers = asyncio.run(_crowd(server, 200))
    num_right = 0
    for number, answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) > 0
            continue
        assert answer.json()["choices"][0]["message"]["content"] == f"answer {number}"
        num_right += 1
    assert num_right >= server.options.max_queue
    wait_for(lambda: server.service.num_requests == 0)
    assert server.engine.num_requests == 0


def _capped(value: Any) -> Any:
    """The same body with every limit of tokens at 4, and few answers."""
    if isinstance(value, dict):
        capped = {key: _capped(item) for key, item in value.items()}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict"):
            if isinstance(capped.get(name), int):
                capped[name] = min(capped[name], 4)
        if isinstance(capped.get("n"), int):
            capped["n"] = min(capped["n"], 2)
        return capped
    return [_capped(item) for item in value] if isinstance(value, list) else value


def operations() -> list[str]:
    return [f"POST {path}" for path in POSTS] + [f"GET {path}" for path in GETS]


@pytest.mark.parametrize("operation", operations())
def test_schemathesis_finds_no_5xx(server: Server, operation: str) -> None:
    """Bodies made from our own /openapi.json; only a 503 that says when to come again would be allowed."""
    document = httpx.get(f"{server.url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    method, path = operation.split()

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=schema[path][method].as_strategy())
    def try_all(case: Any) -> None:
        case.body = _capped(case.body)
        answer = case.call()
        if answer.status_code != 503 or "retry-after" not in answer.headers:
            case.validate_response(answer, checks=[not_a_server_error])

    try_all()
    assert_well(server)
