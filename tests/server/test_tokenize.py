"""`/tokenize`, `/detokenize` and `/apply-template`. Ids are bytes here, 256 is BOS, 258 `</s>`."""

from typing import Any

import httpx
import pytest
from harness import Server
from test_bad_input import assert_shape


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body)


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"content": "ab"}, [97, 98]),
        ({"prompt": "ab"}, [97, 98]),
        ({"content": "ab", "add_special": True}, [256, 97, 98]),
        ({"content": "</s>"}, [258]),
        ({"content": "</s>", "parse_special": False}, list(b"</s>")),
        ({"content": ""}, []),
        ({"messages": [{"role": "user", "content": "</s>"}]}, [256, 257, *b"user\n</s>"]),
    ],
)
def test_tokenize(server: Server, body: dict, ids: list[int]) -> None:
    answer = post(server, "/tokenize", body).json()
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))


def test_pieces_are_texts_or_bytes(server: Server) -> None:
    answer = post(server, "/tokenize", {"content": "aé", "with_pieces": True}).json()
    assert answer["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
    ]


def test_detokenize_gives_the_text_back(server: Server) -> None:
    ids = post(server, "/tokenize", {"content": "Grüße </s>"}).json()["tokens"]
    assert post(server, "/detokenize", {"tokens": ids}).json()["content"] == "Grüße </s>"


def test_lm_eval_finds_a_tokenizer_here(server: Server) -> None:
    """What its backend "auto" asks before anything else, and the ids of the ends that it then takes."""
    info = httpx.get(server.url + "/tokenizer_info", headers={"Content-Type": "application/json"}).json()
    assert (info["bos_token"], info["eos_token"], info["add_bos_token"]) == ("<s>", "</s>", True)
    assert info["chat_template"] == server.template.source
    assert info["model_max_length"] == server.engine.info.context_tokens
    for text, ids in (("test", list(b"test")), ("</s>", [258]), ("<s>", [256])):
        answer = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False})
        assert answer.json()["tokens"] == ids
    assert post(server, "/detokenize", {"tokens": list(b"test")}).json()["prompt"] == "test"


@pytest.mark.parametrize("tokens", [[-1], [512], [2**31], ["a"], [1.5], "ab", None, [True]])
def test_ids_that_are_none(server: Server, tokens: Any) -> None:
    error = assert_shape(post(server, "/detokenize", {"tokens": tokens}), 400)
    assert error["param"].startswith("tokens")


def test_apply_template(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert post(server, "/apply-template", body).json() == {"prompt": "<s><|turn|>user\nhi"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"content": 7}),
        ("/tokenize", {"messages": []}),
        ("/apply-template", {}),
        ("/apply-template", {"messages": []}),
        ("/detokenize", {}),
    ],
)
def test_what_is_missing_is_named(server: Server, path: str, body: dict) -> None:
    assert_shape(post(server, path, body), 400)


def test_other_model(server: Server) -> None:
    for path, body in (("/tokenize", {"content": "x"}), ("/detokenize", {"tokens": [1]})):
        assert_shape(post(server, path, body | {"model": "gpt"}), 404)
