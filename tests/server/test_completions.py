"""`/v1/completions`: texts, ids and lists of either; the echo with log-probabilities."""

import json
from typing import Any

import httpx
import pytest
from harness import Server
from test_bad_input import assert_shape
from test_stream import frames

SCRIPT = json.dumps({"say": "answer"})


def complete(server: Server, prompt: Any = SCRIPT, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"model": "fake", "prompt": prompt} | fields)


def test_openai_client(server: Server) -> None:
    answer = server.client().completions.create(model="fake", prompt=SCRIPT)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "answer"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1 + len(SCRIPT)  # BOS, and a token a byte


def test_stream_is_the_same_text(server: Server) -> None:
    chunks = list(server.client().completions.create(model="fake", prompt=SCRIPT, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "answer"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


def test_answer_is_16_tokens_long_unless_said(server: Server) -> None:
    answer = complete(server, json.dumps({"say": "x" * 40})).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("x" * 16, "length")


def test_prompts_of_every_kind(server: Server) -> None:
    ids = list(SCRIPT.encode())
    for prompt, count in ((SCRIPT, 1), (ids, 1), ([SCRIPT, SCRIPT], 2), ([ids, ids, ids], 3)):
        choices = complete(server, prompt).json()["choices"]
        assert [(choice["index"], choice["text"]) for choice in choices] == [
            (i, "answer") for i in range(count)
        ]


def test_prompts_times_n_are_in_the_order_of_the_prompts(server: Server) -> None:
    prompts = [json.dumps({"say": text}) for text in ("one", "two")]
    answer = complete(server, prompts, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "one", "two", "two"]
    assert answer["usage"]["prompt_tokens"] == sum(1 + len(prompt) for prompt in prompts)


def test_special_tokens_may_be_written_in_a_prompt(server: Server) -> None:
    plain, special = (
        complete(server, SCRIPT + text).json()["usage"]["prompt_tokens"] for text in ("abcd", "</s>")
    )
    assert special == plain - 3


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server: Server, stream: bool) -> None:
    answer = complete(server, echo=True, stream=stream)
    if stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in frames(answer.content)[:-1])
    else:
        text = answer.json()["choices"][0]["text"]
    assert text == SCRIPT + "answer"


def test_echo_alone_needs_no_answer(server: Server) -> None:
    answer = complete(server, "ab", echo=True, max_tokens=0, logprobs=0).json()["choices"][0]
    assert answer["text"] == "ab"
    assert answer["logprobs"]["tokens"] == ["", "a", "b"]


@pytest.mark.parametrize("prompt", [[256, 97, 98, 99], "abc"])
def test_loglikelihood_as_lm_eval_reads_it(server: Server, prompt: Any) -> None:
    """An entry for each prompt token, the first without value, then one for the token generated."""
    body = {"max_tokens": 1, "logprobs": 2, "echo": True, "temperature": 0, "seed": 1234}
    logprobs = complete(server, prompt, **body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][1:4] == ["a", "b", "c"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 4 + 1
    assert logprobs["token_logprobs"][:4] == [None, -97 / 8, -98 / 8, -99 / 8]
    assert logprobs["top_logprobs"][1] == {"a": -97 / 8, "b": -98 / 8}


@pytest.mark.parametrize("prompt", [SCRIPT, [256, 195, 169, 240, 159, 166, 165, 97]])
def test_token_texts_joined_are_the_text(server: Server, prompt: Any) -> None:
    choice = complete(server, prompt, echo=True, logprobs=1, max_tokens=4).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    starts = [sum(map(len, logprobs["tokens"][:index])) for index in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == starts
    streamed = complete(server, prompt, echo=True, logprobs=1, max_tokens=4, stream=True).content
    parts = [chunk["choices"][0]["logprobs"] for chunk in frames(streamed)[:-1]]
    for key in logprobs:
        assert [value for part in parts for value in part[key]] == logprobs[key]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            ("prompt", value)
            for value in (
                [],
                [[]],
                "",
                [""],
                [1, "a"],
                ["a", [1]],
                [1.5],
                [True],
                None,
                7,
                {},
                [[1.5]],
                [[True]],
            )
        ],
        *[("prompt", value) for value in ([-1], [512], [2**31], [[1], [512]], ["x"] * 1025)],
        *[("prompt", value) for value in ([[1.5]], [[True]], [[1], [-1]], [[2**31]])],
        ("logprobs", 21),
        ("logprobs", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("echo", "yes"),
        ("suffix", "x"),
        ("best_of", 2),
        ("n", 0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_field_is_named(server: Server, field: str, value: Any) -> None:
    body = {"add_special_tokens": False} | {field: value}
    error = assert_shape(complete(server, **body), 400)
    assert error["param"] == field
    assert complete(server).json()["choices"][0]["text"] == "answer"


def test_prompts_times_n_are_bounded(server: Server) -> None:
    assert assert_shape(complete(server, ["x"] * 100, n=100), 400)["param"] == "n"


def test_prompt_at_the_context_and_over_it(server: Server) -> None:
    for length, status in ((2047, 200), (2048, 400)):
        answer = complete(server, [120] * length, max_tokens=5)
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert answer.json()["usage"]["completion_tokens"] == 1
        else:
            error = assert_shape(answer, 400)
            assert (error["param"], error["n_prompt_tokens"], error["n_ctx"]) == ("prompt", 2048, 2048)
