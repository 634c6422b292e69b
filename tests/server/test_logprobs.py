"""Log-probabilities in a chat: an entry a token, whose texts joined are the answer. They are -id/8."""

import json

import httpx
import pytest
from harness import Server, chat_body
from test_stream import frames, stream


def whole(server: Server, text: str, **fields: object) -> dict:
    body = chat_body(text, logprobs=True, **fields)
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_each_token_has_its_value_bytes_and_alternatives(server: Server) -> None:
    choice = whole(server, "hi", top_logprobs=2)
    first, second = choice["logprobs"]["content"]
    assert first == {
        "token": "h",
        "logprob": -ord("h") / 8,
        "bytes": [ord("h")],
        "top_logprobs": [
            {"token": "h", "logprob": -ord("h") / 8, "bytes": [ord("h")]},
            {"token": "i", "logprob": -ord("i") / 8, "bytes": [ord("i")]},
        ],
    }
    assert second["token"] == "i"


@pytest.mark.parametrize(
    ("text", "stop"),
    [("plain", None), ("é👩‍👩‍👧 x", None), ("one END two", "END"), ("the EN", "END"), ("aXb", "X")],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_texts_of_the_tokens_are_the_answer(
    server: Server, text: str, stop: str | None, streamed: bool
) -> None:
    """Also where a token is half a character, was held back, or was cut off by a stop string."""
    if streamed:
        chunks = frames(stream(server, text, stop=stop, logprobs=True))[:-1]
        choices = [chunk["choices"][0] for chunk in chunks]
        content = "".join(choice["delta"].get("content", "") for choice in choices)
        entries = [
            entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]
        ]
    else:
        choice = whole(server, text, stop=stop)
        content, entries = choice["message"]["content"], choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == content
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == content


def test_none_without_asking(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("x")).json()
    assert answer["choices"][0]["logprobs"] is None
    assert '"logprobs":null' in stream(server, "x").decode()


def test_openai_client_reads_them(server: Server) -> None:
    answer = server.client().chat.completions.create(**chat_body("ab", logprobs=True, top_logprobs=1))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [entry.token for entry in logprobs.content or ()] == ["a", "b"]
    assert json.loads(answer.model_dump_json())["choices"][0]["logprobs"]["content"][0]["logprob"] == -97 / 8
