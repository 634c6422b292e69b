"""Every way to get a request wrong is its own 4xx in OpenAI's shape, and the next one is still answered."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness import RawStream, Server, chat_body, say, serving, wait_for

from isthmus.config import LONG_TEXT_CHARACTERS

CHAT = "/v1/chat/completions"
LONG = "x" * (1 << 20)


def assert_shape(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert {"message", "type", "param", "code"} <= set(body["error"])
    assert len(body["error"]["message"]) < 500, "an error must not send the input back"
    return body["error"]


def assert_well(server: Server) -> None:
    answer = httpx.post(server.url + CHAT, json=chat_body("well"))
    assert answer.json()["choices"][0]["message"]["content"] == "well"


# Field and value; the error must name the field.
TOOL = {"type": "function", "function": {"name": "f"}}


def _strict(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}


def _of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


BAD_FIELDS: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, -1, 129, 10**9, "1", 1.0, True)],
    *[("max_tokens", value) for value in (0, -1, 10**12, 1.5, "7", True, 2**70)],
    *[("max_completion_tokens", value) for value in (0, -1, 10**12, 1.5, "7")],
    *[("temperature", value) for value in (-1, 1e9, "1", [1], True)],
    *[("top_p", value) for value in (0, -0.1, 1.1, "1")],
    *[("top_k", value) for value in (-5, 1.5, 10**12)],
    *[("min_p", value) for value in (2, -1)],
    *[("presence_penalty", value) for value in (1e9, -1e9, 2.1)],
    *[("frequency_penalty", value) for value in (1e9, -1e9)],
    *[("repetition_penalty", value) for value in (0, -1, 1e9)],
    ("repeat_penalty", 0),
    *[("seed", value) for value in (-1, 2**64, "7", 1.5)],
    *[("stop", value) for value in ("", [""], ["x"] * 10_000, LONG, 7, [7], [None], {"a": 1})],
    *[("ignore_eos", value) for value in (1, "true")],
    *[("stop_token_ids", value) for value in ([512], [-1], [2**31], ["1"], 5, [1] * 100_000)],
    *[
        ("logit_bias", value)
        for value in ({"512": 1}, {"-1": 1}, {"x": 1}, {"1": 101}, {"1": "1"}, {"1.0": 1})
    ],
    ("logit_bias", {str(key): 1 for key in range(2_000)}),
    ("logit_bias", [1]),
    *[("stream", value) for value in ("true", 1, [])],
    *[("stream_options", value) for value in ({"include_usage": True}, "yes", {"include_usage": 1})],
    *[("model", value) for value in (7, ["fake"], LONG)],
    *[("messages", value) for value in ([], None, "hi", {}, [7], [[]], [None], [{}])],
    *[("messages", [{"role": role, "content": "x"}]) for role in ("tool", "function", "", None, 7, "robot")],
    *[("messages", [{"role": "user", "content": content}]) for content in (None, 7, {}, [7], [{}], ["x"])],
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
    ),
    ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}]),
    ("messages", [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]),
    ("messages", [{"role": "assistant", "content": "", "audio": {"id": "1"}}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": "fail"}]),  # the template raises
    ("messages", [{"role": "user", "content": "x"}] * 20_000),
    ("messages", [{"role": "assistant", "content": None}]),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]),
    *[
        ("messages", [{"role": "assistant", "tool_calls": value}])
        for value in ("f", [7], [{}], [{"function": {}}])
    ],
    *[
        ("tools", value)
        for value in ("f", [7], [{"type": "web_search"}], [TOOL | {"type": "custom"}], [TOOL] * 2)
    ],
    *[
        ("tools", [{"type": "function", "function": {"name": name}}])
        for name in ("", "a b", "ü", "f" * 129, 5)
    ],
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": [1]}}]),
    ("tools", [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1025)]),
    ("tools", [_strict({"not": {}})]),
    ("tools", [_strict({"properties": {"a": {"type": "string", "format": "haiku"}}})]),
    *[("tool_choice", value) for value in ("any", 5, {}, {"type": "allowed_tools"})],
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    *[("response_format", {"type": kind}) for kind in ("json_schema", "xml", 5)],
    *[
        ("response_format", _of_schema(value))
        for value in ({"not": {}}, {"type": "strin"}, {"$ref": "http://a/b"})
    ],
    *[
        ("response_format", _of_schema(value))
        for value in (5, True, {"pattern": "a{999999}", "type": "string"})
    ],
    ("response_format", _of_schema({"enum": ["x" * 1000] * 1100})),
    ("response_format", "text"),
    *[("logprobs", value) for value in (1, "true")],
    *[("top_logprobs", value) for value in (5, 21, -1, "1")],
    ("best_of", 2),
    ("audio", {"voice": "alloy"}),
    ("modalities", ["text", "audio"]),
    ("prediction", {"type": "content", "content": "x"}),
    ("grammar", "root ::= 'a'"),
    *[("grammar", {"syntax": "regex", "definition": value}) for value in ("(", "", "a{1000000}", 5)],
    *[
        ("grammar", {"syntax": "lark", "definition": value})
        for value in ("x", "start: start", "start: missing")
    ],
    ("grammar", {"syntax": "gbnf", "definition": "root ::= x"}),
    ("guided_json", {}),
    *[("continue_final_message", value) for value in (True, 1, "true")],  # the last message is a user's
    ("add_generation_prompt", "yes"),
    ("chat_template", "{{ 1 }}"),
    *[
        ("chat_template_kwargs", value)
        for value in ({"messages": 1}, {"tokenize": True}, {"_x": 1}, {"a b": 1}, [1])
    ],
    ("chat_template_kwargs", {"x": {"deep": 1}}),
    ("reasoning_effort", LONG),
    *[("thinking", value) for value in (True, {}, {"type": "maybe"})],
    ("enable_thinking", "no"),
    *[("cache_salt", value) for value in ("", 5, "x" * 257)],
    *[("regex", "[0-9]+"), ("ebnf", "root ::= x"), ("structural_tag", {}), ("allowed_token_ids", [1])],
    *[("n_predict", 5), ("no_repeat_ngram_size", 3), ("reasoning_budget", 0)],
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda value: str(value)[:24])
def test_bad_field_is_named(server: Server, field: str, value: Any) -> None:
    answer = httpx.post(server.url + CHAT, json=chat_body("ok") | {field: value})
    error = assert_shape(answer, 400)
    wanted = "repetition_penalty" if field == "repeat_penalty" else field
    assert error["param"].partition("[")[0].partition(".")[0] in (field, wanted)
    assert error["type"] == "invalid_request_error"
    assert_well(server)


@pytest.mark.parametrize(
    "penalty", [{"repeat_penalty": 1.1}, {"repetition_penalty": 0.9}, {"presence_penalty": 1}]
)
def test_a_window_of_penalties_is_refused_only_beside_one(server: Server, penalty: dict) -> None:
    body = chat_body("ok") | {"repeat_last_n": 64, "max_tokens": 2}
    neutral = {"repeat_penalty": 1.0, "presence_penalty": 0}
    for alone in (body, body | neutral):
        assert httpx.post(server.url + CHAT, json=alone).status_code == 200
    assert assert_shape(httpx.post(server.url + CHAT, json=body | penalty), 400)["param"] == "repeat_last_n"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "audio"}]}, "messages[1].content[0].type"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
    ],
)
def test_param_is_a_path(server: Server, message: dict, param: str) -> None:
    answer = httpx.post(server.url + CHAT, json={"messages": [{"role": "user", "content": "x"}, message]})
    assert assert_shape(answer, 400)["param"] == param


BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "trailing text": b'{"messages": []} x',
    "an array": b"[]",
    "a string": b'"hi"',
    "a number": b"7",
    "null": b"null",
    "100k nested brackets": b"[" * 100_000 + b"]" * 100_000,
    "100k nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep in an ignored field": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "Infinity": b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "UTF-16": '{"messages": []}'.encode("utf-16"),
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_body_that_is_not_a_json_object(server: Server, body: bytes) -> None:
    answer = httpx.post(server.url + CHAT, content=body, headers={"Content-Type": "application/json"})
    assert assert_shape(answer, 400)["code"] == "invalid_json"
    assert_well(server)


MANY = 2_000_000
BIG_BODIES: dict[str, bytes] = {
    "arrays": b'{"x": [' + b"[]," * MANY + b"[]]}",
    "objects": b'{"messages": [' + b"{}," * MANY + b"{}]}",
    "numbers": b'{"x": [' + b"1," * MANY + b"1]}",
    "strings": b'{"x": [' + b'"",' * MANY + b'""]}',
    "keys": b"{" + b",".join(b'"%d":1' % key for key in range(500_000)) + b"}",
    "arrays after an escaped quote": b'{"y": "\\\\", "x": [' + b"[]," * MANY + b"[]]}",
}


@pytest.mark.parametrize("body", BIG_BODIES.values(), ids=BIG_BODIES)
def test_body_of_more_objects_than_any_request_has(server: Server, body: bytes) -> None:
    """Making Python objects of them would keep the event loop for seconds."""
    answer = httpx.post(server.url + CHAT, content=body, headers={"Content-Type": "application/json"})
    assert assert_shape(answer, 400)["code"] == "too_many_values"


@pytest.mark.parametrize("text", ['[{,:"\\' * 300_000, '\\"[' * 500_000], ids=["mixed", "escapes"])
def test_text_may_hold_as_many_brackets_as_it_likes(server: Server, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}]}
    error = assert_shape(httpx.post(server.url + CHAT, json=body), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_wrong_content_type(server: Server, kind: str | None) -> None:
    """What a web page may send to another site without asking is not taken."""
    headers = {"Content-Type": kind} if kind else {}
    answer = httpx.post(server.url + CHAT, content=json.dumps(chat_body()), headers=headers)
    assert_shape(answer, 415)


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip"])
def test_a_body_that_is_packed(server: Server, coding: str) -> None:
    data = gzip.compress(json.dumps(chat_body()).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    answer = httpx.post(server.url + CHAT, content=data, headers=headers)
    assert assert_shape(answer, 415)["code"] == "unsupported_content_encoding"
    plain = httpx.post(server.url + CHAT, json=chat_body(), headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


def test_charset_beside_the_content_type_is_fine(server: Server) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert httpx.post(server.url + CHAT, content=json.dumps(chat_body()), headers=headers).status_code == 200


def test_body_of_100_mb_is_refused_by_its_length(server: Server) -> None:
    answer = httpx.post(
        server.url + CHAT, content=b" " * 100_000_000, headers={"Content-Type": "application/json"}
    )
    assert_shape(answer, 413)
    assert_well(server)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("GET", "/docs", 404, "unknown_url"),
        ("GET", "/health/", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", CHAT, 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_unknown_paths_and_methods(server: Server, method: str, path: str, status: int, code: str) -> None:
    answer = httpx.request(method, server.url + path)
    assert assert_shape(answer, status)["code"] == code
    assert status != 405 or answer.headers["allow"]


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/v1/models", 200), ("/v1/models/fake", 200), (CHAT, 405)]
)
def test_head(server: Server, path: str, status: int) -> None:
    answer = httpx.head(server.url + path)
    assert (answer.status_code, answer.content) == (status, b"")


def test_unknown_model(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().chat.completions.create(model="gpt-4o", messages=say("x"))
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_over_the_context(server: Server, stream: bool) -> None:
    """The context is 2048; 7 tokens of the template stand before the text."""
    for extra, fits in ((0, True), (1, False), (5000, False)):
        text = '{"say":""}' + "x" * (2048 - 1 - 7 - 10 + extra)
        body = {"messages": [{"role": "user", "content": text}], "stream": stream}
        answer = httpx.post(server.url + CHAT, json=body)
        if fits:
            assert answer.status_code == 200
            continue
        error = assert_shape(answer, 400)
        assert error["code"] == "context_length_exceeded"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (2047 + extra, 2048)


def test_megabytes_that_cannot_fit_are_refused_unread(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "x" * (4 << 20)}]}
    error = assert_shape(httpx.post(server.url + CHAT, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]


def test_a_short_text_does_not_wait_for_long_ones(server: Server) -> None:
    """More long ones than there are threads, all held up while they are rendered."""
    server.template.hold.clear()
    long = {"messages": [{"role": "user", "content": "x" * LONG_TEXT_CHARACTERS}]}
    with ThreadPoolExecutor(4) as clients:
        held = [clients.submit(httpx.post, f"{server.url}/apply-template", json=long) for _ in range(4)]
        wait_for(lambda: server.template.waiting == 1)
        short = httpx.post(f"{server.url}/tokenize", json={"content": "abc"})
        assert short.json()["count"] == 3
        assert not any(each.done() for each in held)
        server.template.hold.set()
        assert [each.result().status_code for each in held] == [200] * 4


def test_full_queue_is_a_503_with_retry_after(tmp_path: Path) -> None:
    with serving(tmp_path, gated=True, max_queue=1) as server:
        with RawStream(server, chat_body("a")) as first, RawStream(server, chat_body("b")) as second:
            wait_for(lambda: server.engine.num_requests == 2)
            answer = httpx.post(server.url + CHAT, json=chat_body("c", stream=True))
            assert assert_shape(answer, 503)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) > 0
            server.grant(6)
            assert b'"content":"a"' in first.read_all()
            assert b'"content":"b"' in second.read_all()
        server.grant(6)
        assert_well(server)
