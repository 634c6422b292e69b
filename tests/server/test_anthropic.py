"""The anthropic client against `/v1/messages`, and the bytes of its stream."""

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest
from harness import Server, serving, wait_for

SAY = json.dumps({"say": "Hello there"})


def body(content: Any = SAY, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 64, "messages": [{"role": "user", "content": content}]} | fields


def client(server: Server) -> anthropic.Anthropic:
    return server.closing(anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0))


def events(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event; both must agree on the type."""
    found = []
    for event in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][0] == found[-1][1]["type"]
    return found


def stream(server: Server, content: Any = SAY, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    answer = httpx.post(f"{server.url}/v1/messages", json=body(content, stream=True, **fields))
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.content)


def test_whole_answer(server: Server) -> None:
    message = client(server).messages.create(**body())
    assert message.id.startswith("msg")
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert [block.text for block in message.content] == ["Hello there"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == 11


def test_stream_helper_gives_the_same(server: Server) -> None:
    with client(server).messages.stream(**body()) as running:
        text = "".join(running.text_stream)
        message = running.get_final_message()
    assert text == "Hello there"
    assert message.content[0].text == "Hello there"
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 11)


def test_async_client(server: Server) -> None:
    async def ask() -> str:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as running:
            return (await running.messages.create(**body())).content[0].text

    assert asyncio.run(ask()) == "Hello there"


def test_order_of_the_events(server: Server) -> None:
    seen = stream(server)
    names = [name for name, _ in seen]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = seen[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"]["input_tokens"] > 0
    assert seen[1][1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert seen[2][1]["delta"]["type"] == "text_delta"
    assert seen[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert seen[-2][1]["usage"]["output_tokens"] == 11


def test_empty_answer_has_no_block(server: Server) -> None:
    names = [name for name, _ in stream(server, json.dumps({"say": ""}))]
    assert names == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize("streamed", [False, True])
def test_reasons_of_the_end(server: Server, streamed: bool) -> None:
    for fields, reason, sequence in (
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["there", "x"]}, "stop_sequence", "there"),
    ):
        if streamed:
            end = dict(stream(server, **fields))["message_delta"]["delta"]
        else:
            end = httpx.post(f"{server.url}/v1/messages", json=body(**fields)).json()
        assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)


def test_system_and_blocks_reach_the_template(server: Server) -> None:
    """The scripted engine reads its script from the prompt: a system message that holds it is obeyed."""
    fields = {"system": [{"type": "text", "text": SAY, "cache_control": {"type": "ephemeral"}}]}
    message = client(server).messages.create(**body([{"type": "text", "text": "hi"}], **fields))
    assert message.content[0].text == "Hello there"


def test_count_tokens_is_what_the_answer_says(server: Server) -> None:
    counted = client(server).messages.count_tokens(model="fake", messages=body()["messages"])
    assert counted.input_tokens == client(server).messages.create(**body()).usage.input_tokens


def test_slow_prefill_gets_pings(tmp_path) -> None:
    with serving(tmp_path, gated=True, ping_interval_s=0.02) as server:
        content = json.dumps({"say": "x", "prefill": 2})
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body(content, stream=True)) as answer:
            lines = answer.iter_lines()
            assert [next(lines), next(lines)] == ["event: ping", 'data: {"type":"ping"}']
            server.grant(4)
            assert "event: message_stop" in list(lines)


def test_client_that_leaves_ends_the_work(gated: Server) -> None:
    with httpx.Client() as http, pytest.raises(httpx.ReadTimeout):
        http.post(f"{gated.url}/v1/messages", json=body(), timeout=0.3)
    wait_for(lambda: gated.engine.num_requests == 0)


def test_fault_in_the_stream_is_an_error_event(gated: Server) -> None:
    content = json.dumps({"say": "ab", "end": "error"})
    gated.grant(3)
    with httpx.stream("POST", f"{gated.url}/v1/messages", json=body(content, stream=True)) as answer:
        lines = answer.iter_lines()
        while "content_block_delta" not in next(lines):
            pass
        gated.grant(1)
        rest = list(lines)
    assert rest[-3] == "event: error"
    error = json.loads(rest[-2].removeprefix("data: "))
    assert error["error"]["type"] == "api_error"
    assert "message_stop" not in "".join(rest)


def assert_error(answer: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"type", "error"}
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    return answer.json()["error"]


BAD = [
    {"max_tokens": None},
    {"max_tokens": 0},
    {"max_tokens": "7"},
    {"messages": []},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "user", "content": None}]},
    {"system": 7},
    {"temperature": -1},
    {"top_p": 0},
    {"top_k": -5},
    {"stop_sequences": [""]},
    {"stop_sequences": "x"},
    {"tools": [{"name": ""}]},
    {"tool_choice": {"type": "robot"}},
    {"stream": "yes"},
    {"mcp_servers": [{"url": "http://x"}]},
    {"thinking": {"type": "maybe"}},
]


@pytest.mark.parametrize("fields", BAD, ids=lambda fields: str(fields)[:30])
@pytest.mark.parametrize("path", ["/v1/messages"])
def test_bad_field_has_anthropics_shape(server: Server, path: str, fields: dict) -> None:
    answer = httpx.post(server.url + path, json=body(**fields))
    error = assert_error(answer, 400, "invalid_request_error")
    assert error["param"].partition("[")[0].partition(".")[0] in fields
    assert client(server).messages.create(**body()).content[0].text == "Hello there"


def test_other_errors_have_it_too(server: Server, tmp_path) -> None:
    url = f"{server.url}/v1/messages"
    assert_error(httpx.post(url, json=body(model="claude")), 404, "not_found_error")
    assert_error(httpx.get(url), 405, "invalid_request_error")
    assert_error(httpx.post(f"{url}/batches", json={}), 404, "not_found_error")
    assert_error(httpx.post(url, content=b"{"), 415, "invalid_request_error")
    assert_error(httpx.post(url, json=body(), headers={"Host": "evil"}), 403, "permission_error")
    long = assert_error(httpx.post(url, json=body("x" * 5000)), 400, "invalid_request_error")
    assert (long["code"], long["n_ctx"]) == ("context_length_exceeded", 2048)
    with serving(tmp_path, api_key="sk-1") as locked:
        wrong = httpx.post(f"{locked.url}/v1/messages", json=body(), headers={"x-api-key": "no"})
        assert_error(wrong, 401, "authentication_error")
        with pytest.raises(anthropic.AuthenticationError):
            client(locked).messages.create(**body())
        right = locked.closing(anthropic.Anthropic(base_url=locked.url, api_key="sk-1"))
        assert right.messages.create(**body()).content[0].text == "Hello there"
