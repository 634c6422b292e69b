"""Programs of others against `isthmus serve demo`: chats, formats that must hold, and calls of tools.

The model is small and would not obey by itself: what must hold is held by the grammar of a schema or a call.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import ollama
import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field
from serve_process import Serve


class Colour(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["red", "green", "blue"]
    warm: bool


QUESTION: list[Any] = [{"role": "user", "content": "Which colour has the sky? Answer as JSON."}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TOOL: Any = {"type": "function", "function": WEATHER}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
FIXED = {"model": "demo", "temperature": 0, "max_tokens": 120}


def assert_weather(arguments: dict[str, Any]) -> None:
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")


@pytest.fixture(scope="module")
def client(demo: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.wait_ready(), api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def host(demo: Serve) -> str:
    return demo.wait_ready().removesuffix("/v1")


def test_openai_parses_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(messages=QUESTION, response_format=Colour, **FIXED)
    assert isinstance(answer.choices[0].message.parsed, Colour)


def test_openai_parses_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="demo", input=QUESTION, text_format=Colour, temperature=0, max_output_tokens=120
    )
    assert isinstance(answer.output_parsed, Colour)


def test_openai_async_stream_parses_it_too(demo: Serve) -> None:
    async def ask() -> Any:
        async with (
            openai.AsyncOpenAI(base_url=demo.wait_ready(), api_key="none") as running,
            running.chat.completions.stream(messages=QUESTION, response_format=Colour, **FIXED) as stream,
        ):
            return (await stream.get_final_completion()).choices[0].message.parsed

    assert isinstance(asyncio.run(ask()), Colour)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_openai_calls_a_tool_and_reads_its_result(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        messages=ASK, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, **FIXED
    )
    message = answer.choices[0].message
    (call, *_) = message.tool_calls or ()
    assert call.function.name == "get_weather"
    assert_weather(json.loads(call.function.arguments))
    assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 C"}
    calls = message.model_dump(exclude_none=True) | {"tool_calls": [call.model_dump()]}
    after = client.chat.completions.create(messages=[*ASK, calls, result], tools=[TOOL], **FIXED)
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_openai_stream_helper_assembles_the_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **FIXED
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    (call, *_) = message.tool_calls or ()
    assert_weather(json.loads(call.function.arguments))


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_uses_a_tool(host: str, streamed: bool) -> None:
    tool = {"name": "get_weather", "input_schema": WEATHER["parameters"]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields: Any = {"model": "demo", "messages": ASK, "tools": [tool], "tool_choice": choice}
    fields |= {"max_tokens": 120, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=host, api_key="none") as client:
        if streamed:
            with client.messages.stream(**fields) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**fields)
    used = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert_weather(used[0].input)


def test_responses_call_a_function(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function"} | WEATHER
    response = client.responses.create(
        model="demo", input=ASK, tools=[tool], tool_choice="required", temperature=0, max_output_tokens=120
    )
    (call, *_) = [item for item in response.output if item.type == "function_call"]
    assert_weather(json.loads(call.arguments))


def test_ollama_holds_a_format_and_streams(host: str) -> None:
    options = {"temperature": 0, "num_predict": 120}
    with ollama.Client(host=host) as client:
        answer = client.chat("demo", QUESTION, format=Colour.model_json_schema(), options=options)
        parts = list(client.generate("demo", "The sky is", stream=True, options={"num_predict": 4}))
    assert isinstance(Colour.model_validate_json(answer.message.content or ""), Colour)
    assert parts[-1].done
    assert parts[-1].eval_count == 4


@pytest.fixture(scope="module")
def chain(demo: Serve) -> ChatOpenAI:
    return ChatOpenAI(base_url=demo.wait_ready(), api_key="none", model="demo", temperature=0, max_tokens=120)


def test_langchain_invokes_and_streams(chain: ChatOpenAI) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage("Why is the sky blue?")]
    whole = chain.invoke(messages, max_tokens=16)
    pieces = list(chain.stream(messages, max_tokens=16))
    assert "".join(str(piece.content) for piece in pieces) == whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 16


def test_langchain_structures_and_calls(chain: ChatOpenAI) -> None:
    assert isinstance(chain.with_structured_output(Colour).invoke("Which colour has the sky?"), Colour)

    class GetWeather(BaseModel):
        """The weather of a city."""

        city: str = Field(max_length=20)
        unit: Literal["C", "F"]

    answer = chain.bind_tools(
        [GetWeather], tool_choice="GetWeather", strict=True, parallel_tool_calls=False
    ).invoke("Weather in Paris?")
    (call, *_) = answer.tool_calls
    assert call["name"] == "GetWeather"
    assert_weather(call["args"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_prompt_is_found_in_the_cache_by_those_of_its_salt(host: str, path: str) -> None:
    text = f"{path}: a text that nobody else has asked for."

    def num_cached(**fields: str) -> int:
        body = {"messages": [{"role": "user", "content": text}], "prompt": text, "max_tokens": 1} | fields
        answer = httpx.post(host + path, json=body, timeout=60).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    salted = [num_cached(cache_salt="a"), num_cached(cache_salt="a"), num_cached(cache_salt="b")]
    assert (salted[0], salted[2]) == (0, 0)
    assert salted[1] > 0
