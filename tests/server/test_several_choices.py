"""`n`: several answers to one conversation, whole and as one stream whose chunks say which they belong to."""

import httpx
from harness import RawStream, Server, chat_body, wait_for
from test_stream import frames, stream


def test_whole_answers_are_in_order_and_the_prompt_counts_once(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("four", n=3)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"four"}
    one = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("four")).json()["usage"]
    assert answer["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * 4


def test_stream_has_a_role_and_an_end_for_each(server: Server) -> None:
    chunks = frames(stream(server, "abc", n=2))[:-1]
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "abc"
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]


def test_client_that_leaves_ends_all_of_them(gated: Server) -> None:
    with RawStream(gated, chat_body("x", n=3)):
        wait_for(lambda: gated.engine.num_requests == 3)
    wait_for(lambda: gated.engine.num_requests == 0)
    wait_for(lambda: gated.service.num_requests == 0)
