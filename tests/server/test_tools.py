"""Tools and thoughts over HTTP: what the openai client sees when the model's text has calls in it."""

import json
from typing import Any

import httpx
import pytest
from harness import Server, chat_body, say

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHTS = "<think>\nThe user wants <b>weather</b>.\n</think>\n\n"


def ask(server: Server, text: str, **fields: Any) -> Any:
    return server.client().chat.completions.create(model="fake", messages=say(text), **fields).choices[0]


def test_a_call_is_no_content(server: Server) -> None:
    choice = ask(server, CALL, tools=TOOLS)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Köln"}


def test_thoughts_content_and_two_calls(server: Server) -> None:
    choice = ask(server, f"{THOUGHTS}I look.\n{CALL}\n{CALL}", tools=TOOLS)
    assert choice.message.reasoning_content == "The user wants <b>weather</b>."
    assert choice.message.content == "I look."
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_a_stream_names_a_call_once_and_then_sends_its_arguments(server: Server) -> None:
    text = f"{THOUGHTS}I look.\n{CALL}"
    chunks = list(
        server.client().chat.completions.create(model="fake", messages=say(text), tools=TOOLS, stream=True)
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == (
        "The user wants <b>weather</b>."
    )
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.index for part in parts] == [0] * len(parts)
    assert (parts[0].function.name, parts[0].type) == ("get_weather", "function")
    assert not any(part.id or part.function.name for part in parts[1:])
    assert json.loads("".join(part.function.arguments for part in parts)) == {"city": "Köln"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_call_is_text(server: Server, fields: dict[str, Any]) -> None:
    choice = ask(server, CALL, **fields)
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_call_is_content(server: Server, stream: bool) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": Köln}}</tool_call>'
    if not stream:
        choice = ask(server, text, tools=TOOLS)
        assert (choice.message.content, choice.message.tool_calls) == (text, None)
        assert choice.finish_reason == "stop"
        return
    chunks = list(
        server.client().chat.completions.create(model="fake", messages=say(text), tools=TOOLS, stream=True)
    )
    # What was sent of the call before it broke cannot be taken back; the rest of its text follows as content.
    assert chunks[-1].choices[0].finish_reason == "stop"
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert content in (text, "Köln}}</tool_call>")


def test_a_call_cut_off_by_the_limit(server: Server) -> None:
    choice = ask(server, CALL, tools=TOOLS, max_tokens=50)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content == CALL.encode()[:50].decode()


@pytest.mark.parametrize("content", [None, "I look."])
def test_calls_and_results_in_the_history(server: Server, content: str | None) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'},
    }
    messages: list[Any] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        *say("It rains."),
    ]
    answer = server.client().chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "It rains."


def test_a_result_of_no_call_is_refused(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c2", "content": "x"},
    ]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_a_choice_of_a_function_that_is_not_there(server: Server) -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    body = chat_body(tools=TOOLS, tool_choice=choice)
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
