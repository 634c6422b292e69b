"""Answers held against the types of the clients' own packages, strictly.

The clients themselves read whatever comes and leave out what they miss; here a field that is missing or of
another type fails, and so does one that they do not know, but for what this server adds on purpose.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic.types
import httpx
import ollama
import openai.types.chat
import openai.types.responses
import pytest
from harness import Server, say
from pydantic import BaseModel, TypeAdapter

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Köln"}}\n</tool_call>'
TEXT = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "x", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]

# What other servers add, and clients of those read.
ADDED = {"timings", "reasoning_content", "store", "name"}


def unknown(value: Any) -> set[str]:
    """Fields of an answer that its types do not have."""
    if isinstance(value, BaseModel):
        fields = [getattr(value, name, None) for name in type(value).model_fields]
        return set(value.model_extra or {}).union(*map(unknown, fields))
    if isinstance(value, list | tuple):
        return set().union(*map(unknown, value))
    return set()


def checked(kind: Any, data: Any) -> Any:
    value = TypeAdapter(kind).validate_python(data, strict=False)
    assert unknown(value) <= ADDED
    return value


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json={"model": "fake"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Server, path: str, **body: Any) -> Iterator[dict[str, Any]]:
    """The data of a stream's events, whose names are their types."""
    answer = httpx.post(server.url + path, json={"model": "fake", "stream": True} | body)
    name = None
    for line in answer.text.splitlines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data" and value != "[DONE]":
            data = json.loads(value)
            assert name is None or data["type"] == name
            yield data


def read(server: Server, kind: Any, path: str, **body: Any) -> list[Any]:
    return [checked(kind, event) for event in events(server, path, **body)]


CHAT: dict[str, Any] = {"messages": say(TEXT), "tools": CHAT_TOOLS}
RESPONSE: dict[str, Any] = {"input": say(TEXT), "tools": [{"type": "function"} | FUNCTION]}
TOOL = {"name": "f", "input_schema": PARAMETERS}
MESSAGE: dict[str, Any] = {"messages": say(TEXT), "tools": [TOOL], "max_tokens": 500}


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2, "n": 2}])
def test_chat_completions(server: Server, fields: dict[str, Any]) -> None:
    answer = checked(openai.types.chat.ChatCompletion, post(server, "/v1/chat/completions", **CHAT, **fields))
    assert len(answer.choices[0].message.tool_calls) == 2
    options = {"stream_options": {"include_usage": True}}
    for chunk in events(server, "/v1/chat/completions", **CHAT, **fields, **options):
        checked(openai.types.chat.ChatCompletionChunk, chunk)


def test_completions(server: Server) -> None:
    body = {"prompt": '{"say": "abc"}', "logprobs": 2}
    checked(openai.types.Completion, post(server, "/v1/completions", **body))
    for chunk in events(server, "/v1/completions", **body):
        for choice in chunk["choices"]:  # null before the last, which the client's type does not foresee
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        checked(openai.types.Completion, chunk)


def test_responses(server: Server) -> None:
    answer = checked(openai.types.responses.Response, post(server, "/v1/responses", **RESPONSE))
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in answer.output] == kinds
    seen = [
        checked(openai.types.responses.ResponseStreamEvent, e)
        for e in events(server, "/v1/responses", **RESPONSE)
    ]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [event.response.status for event in seen[:2]] == ["in_progress"] * 2
    assert seen[0].response.usage is None
    done = [event.item for event in seen if event.type == "response.output_item.done"]
    assert [item.type for item in done] == kinds
    assert seen[-1].response.output == done


def test_what_is_missing_of_a_response_that_was_cut_is_said_of_its_last_item(server: Server) -> None:
    body = RESPONSE | {"max_output_tokens": len(TEXT) - 20}
    whole = checked(openai.types.responses.Response, post(server, "/v1/responses", **body))
    *_, end = events(server, "/v1/responses", **body)
    streamed = checked(openai.types.responses.Response, end["response"])
    done = [
        e["item"]["status"]
        for e in events(server, "/v1/responses", **body)
        if e["type"].endswith("item.done")
    ]
    for statuses in ([item.status for item in whole.output], [item.status for item in streamed.output], done):
        assert statuses == ["completed"] * 3 + ["incomplete"]


def test_messages(server: Server) -> None:
    answer = checked(anthropic.types.Message, post(server, "/v1/messages", **MESSAGE))
    kinds = ["thinking", "text", "tool_use", "tool_use"]
    assert [block.type for block in answer.content] == kinds
    assert (answer.stop_reason, answer.content[2].input) == ("tool_use", {"city": "Köln"})
    seen = [
        checked(anthropic.types.RawMessageStreamEvent, e) for e in events(server, "/v1/messages", **MESSAGE)
    ]
    blocks = seen[1:-2]
    assert [event.type for event in (seen[0], *seen[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    deltas = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
    for index, kind in enumerate(kinds):
        own = [event for event in blocks if event.index == index]
        assert blocks[: len(own)] == own, "a block ends before the next begins"
        blocks = blocks[len(own) :]
        assert (own[0].type, own[0].content_block.type) == ("content_block_start", kind)
        assert {event.delta.type for event in own[1:-1]} == {deltas[kind]}
        assert own[-1].type == "content_block_stop"
        if kind == "tool_use":
            assert own[0].content_block.input == {}
            assert json.loads("".join(event.delta.partial_json for event in own[1:-1])) == {"city": "Köln"}


def test_ollama(server: Server) -> None:
    body = {"messages": say(TEXT), "tools": CHAT_TOOLS}
    answer = checked(ollama.ChatResponse, post(server, "/api/chat", stream=False, **body))
    assert (answer.message.thinking, answer.message.content) == ("hm", "I look.")
    assert [call.function.arguments for call in answer.message.tool_calls or ()] == [{"city": "Köln"}] * 2
    lines = httpx.post(f"{server.url}/api/chat", json={"model": "fake"} | body).text.splitlines()
    parts = [checked(ollama.ChatResponse, json.loads(line)) for line in lines]
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    assert "".join(part.message.content or "" for part in parts) == "I look."
    assert parts[-1].message.tool_calls == answer.message.tool_calls
    end = parts[-1]
    assert (end.done, end.done_reason) == (True, "stop")
    assert end.total_duration >= end.prompt_eval_duration > 0
    checked(ollama.GenerateResponse, post(server, "/api/generate", stream=False, prompt='{"say": "x"}'))
    checked(ollama.ShowResponse, post(server, "/api/show"))
    checked(ollama.ListResponse, httpx.get(f"{server.url}/api/tags").json())
    checked(ollama.ProcessResponse, httpx.get(f"{server.url}/api/ps").json())
