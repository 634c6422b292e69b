"""The openai client against `/v1/chat/completions` and `/v1/models`: what it gets, whole and streamed."""

import asyncio
import concurrent.futures
import json

import httpx
import openai
import pytest
from harness import Server, chat_body, say

EMOJI = "Grüße 👩‍👩‍👧 नमस्ते 你好\u2028 end"


def test_whole_answer(server: Server) -> None:
    answer = server.client().chat.completions.create(model="fake", messages=say("Hello there"))
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "fake"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello there"
    assert answer.choices[0].finish_reason == "stop"


def test_usage_counts_the_tokens_of_prompt_and_answer(server: Server) -> None:
    messages = say("four")
    usage = server.client().chat.completions.create(model="fake", messages=messages).usage
    assert usage is not None
    prompt = 1 + 1 + len("user\n") + len(messages[0]["content"])  # <s>, <|turn|>, then a token a byte
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 4, prompt + 4)


def test_stream_gives_the_same_text(server: Server) -> None:
    with server.client().chat.completions.create(model="fake", messages=say("Hello"), stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


async def _async_text(server: Server) -> str:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model="fake", messages=say("async"), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_async_client(server: Server) -> None:
    assert asyncio.run(_async_text(server)) == "async"


@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_several_tokens_arrive_whole(server: Server, stream: bool) -> None:
    """Each token is one byte here, so every emoji is split; no piece may hold a replacement character."""
    if stream:
        chunks = server.client().chat.completions.create(model="fake", messages=say(EMOJI), stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    else:
        answer = server.client().chat.completions.create(model="fake", messages=say(EMOJI))
        pieces = [answer.choices[0].message.content or ""]
    assert "".join(pieces) == EMOJI
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_token_limit_ends_with_length(server: Server, field: str) -> None:
    body = chat_body("abcdef", **{field: 3})
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_is_held_back_cut_off_and_ends_the_engine(server: Server, stream: bool) -> None:
    """Two strings begin alike: "EN" may become "END" or "ENOUGH" and must wait until that is clear."""
    body = chat_body("one ENTRY two ENOUGH three", stop=["END", "ENOUGH"])
    client = server.client()
    if stream:
        chunks = list(client.chat.completions.create(**body, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason, request_id = chunks[-1].choices[0].finish_reason, chunks[0].id
    else:
        answer = client.chat.completions.create(**body)
        text, reason, request_id = (
            answer.choices[0].message.content,
            answer.choices[0].finish_reason,
            answer.id,
        )
    assert (text, reason) == ("one ENTRY two ", "stop")
    client.chat.completions.create(model="fake", messages=say("next"))  # the engine reads commands in order
    assert f"cancel {request_id}" in server.log()


@pytest.mark.parametrize("stream", [False, True])
def test_text_held_back_for_a_stop_string_is_not_lost_at_the_end(server: Server, stream: bool) -> None:
    body = chat_body("the EN", stop="END")
    if stream:
        chunks = server.client().chat.completions.create(**body, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = server.client().chat.completions.create(**body).choices[0].message.content or ""
    assert text == "the EN"


@pytest.mark.parametrize(
    ("ignore_eos", "text", "count"), [(True, "abcd", 5), (False, "ab", 2), (None, "ab", 2)]
)
def test_end_tokens_may_be_ignored(server: Server, ignore_eos: bool | None, text: str, count: int) -> None:
    """`</s>` (258) stands in the middle: it counts and is not shown."""
    script = {"tokens": [*b"ab", 258, *b"cd"]}
    body = chat_body("", script=script, ignore_eos=ignore_eos)
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["completion_tokens"] == count
    body = {"prompt": body["messages"][0]["content"], "ignore_eos": ignore_eos, "max_tokens": 9}
    assert httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"] == text


def test_an_answer_held_by_a_grammar_ends_where_it_does(server: Server) -> None:
    script = {"tokens": [*b"ab", 258, *b"cd"]}
    grammar = {"syntax": "regex", "definition": "ab"}
    body = chat_body("", script=script, ignore_eos=True, grammar=grammar)
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "ab"


def test_parts_of_text_are_joined_by_line_ends(server: Server) -> None:
    """The scripted engine reads its script from the prompt: one over two parts shows how they join."""
    parts = [{"type": "text", "text": '{"say":'}, {"type": "text", "text": '"joined"}'}]
    answer = server.client().chat.completions.create(
        model="fake", messages=[{"role": "user", "content": parts}]
    )
    assert answer.choices[0].message.content == "joined"


def test_special_tokens_in_user_text_stay_text(server: Server) -> None:
    """`</s>` written by a user is its four characters, so it costs four tokens and ends nothing."""
    plain = server.client().chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "abcd"}]
    )
    special = server.client().chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "</s>"}]
    )
    assert plain.usage is not None
    assert plain.usage == special.usage


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "nobody_knows": [1]},
        {"n": 1, "tools": [], "response_format": {"type": "text"}, "logprobs": False, "modalities": ["text"]},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "seed": 2**63, "logit_bias": {"7": -100}},
        {"temperature": 1e-9, "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.1},
        {"temperature": None, "max_tokens": None, "stop": None, "stream": None, "tools": None, "model": None},
        {"stop": [], "stop_token_ids": [5], "chat_template_kwargs": {"enable_thinking": False}},
        {
            "messages": [
                {"role": "developer", "content": "Be kind"},
                {"role": "user", "content": '{"say":"ok"}'},
            ]
        },
        {
            "messages": [
                {"role": "assistant", "content": "", "refusal": None, "audio": None, "tool_calls": None}
            ]
        },
        {"model": "alias"},
    ],
)
def test_fields_that_are_accepted(server: Server, fields: dict) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("ok") | fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "ok"


def test_models_are_listed_with_their_context(server: Server) -> None:
    listed = server.client().models.list().data
    assert [model.id for model in listed] == ["fake", "alias"]
    assert listed[0].max_model_len == 2048  # type: ignore[attr-defined]
    assert server.client().models.retrieve("alias").id == "alias"


def test_openapi_describes_the_body(server: Server) -> None:
    schema = httpx.get(f"{server.url}/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert {"messages", "temperature", "stream"} <= set(body["properties"])
    message = body["properties"]["messages"]["items"]["properties"]
    assert message["role"]["enum"] == ["system", "developer", "user", "assistant", "tool"]
    assert "$ref" not in json.dumps(body)


def test_requests_are_answered_one_after_the_other_and_not_mixed_up(server: Server) -> None:
    def ask(number: int) -> str | None:
        text = f"answer {number}" * 5
        return (
            server.client()
            .chat.completions.create(model="fake", messages=say(text))
            .choices[0]
            .message.content
        )

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(24))) == [f"answer {number}" * 5 for number in range(24)]


@pytest.mark.parametrize(
    ("path", "fields", "thinks"),
    [
        ("/v1/chat/completions", {}, None),
        ("/v1/chat/completions", {"enable_thinking": True}, True),
        ("/v1/chat/completions", {"thinking": {"type": "disabled"}}, False),
        ("/v1/chat/completions", {"thinking": {"type": "enabled", "budget_tokens": 9}}, True),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, False),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, True),
        ("/api/chat", {"think": False}, False),
    ],
)
def test_whether_to_think_reaches_templates_by_either_name(
    server: Server, path: str, fields: dict, thinks: bool | None
) -> None:
    answer = httpx.post(server.url + path, json=chat_body(max_tokens=5) | fields)
    assert answer.status_code == 200, answer.text
    asked = server.template.asked
    assert (asked.get("enable_thinking"), asked.get("thinking")) == (thinks, thinks)


def test_what_is_said_to_the_template_itself_counts_more(server: Server) -> None:
    fields = {"enable_thinking": True, "chat_template_kwargs": {"thinking": False}}
    httpx.post(f"{server.url}/v1/chat/completions", json=chat_body() | fields)
    assert (server.template.asked["enable_thinking"], server.template.asked["thinking"]) == (True, False)
