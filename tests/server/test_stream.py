"""The bytes of a stream: what comes first, what comes last, and what never comes."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import RawStream, Server, chat_body, serving, wait_for


def frames(raw: bytes) -> list[Any]:
    """Data of each event; comments are left out. Every event must be exactly one `data:` line."""
    events = raw.decode().split("\n\n")
    assert events.pop() == "", "the stream must end with a blank line"
    data = [event for event in events if not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in data)
    return ["[DONE]" if event == "data: [DONE]" else json.loads(event[6:]) for event in data]


def stream(server: Server, text: str = "Hello", **fields: Any) -> bytes:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body(text, stream=True, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.content


def test_order_of_a_stream(server: Server) -> None:
    """Role first and once; then content, never empty; the reason only at the end; [DONE] last."""
    *chunks, done = frames(stream(server))
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"


def test_chunks_share_their_head(server: Server) -> None:
    chunks = frames(stream(server))[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["choices"][0]["index"] == 0 for chunk in chunks)


def test_empty_answer_is_a_role_and_a_reason(server: Server) -> None:
    role, end, done = frames(stream(server, ""))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"], done) == ({}, "stop", "[DONE]")


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_does_not_come_unasked(server: Server, options: dict | None) -> None:
    chunks = frames(stream(server, stream_options=options))[:-1]
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


def test_usage_comes_once_before_done_with_no_choices(server: Server) -> None:
    *chunks, usage, done = frames(stream(server, "four", stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 4
    assert all(chunk["usage"] is None for chunk in chunks)


def test_no_piece_is_cut_inside_a_character_or_a_line(server: Server) -> None:
    """U+2028 and U+0085 end lines for many clients, so they travel escaped; other text as UTF-8."""
    raw = stream(server, "é👩‍👩‍👧\u2028\u2029\x85\x1cx")
    assert not any(end in raw.decode() for end in "\u2028\u2029\x85\x1c")
    assert len(raw.decode().splitlines()) == raw.count(b"\n")
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in frames(raw)[:-1])
    assert text == "é👩‍👩‍👧\u2028\u2029\x85\x1cx"
    assert "é".encode() in raw


def test_fault_in_the_stream_is_an_error_frame_then_done(gated: Server) -> None:
    """After the first token the status is sent, so the error is in the stream."""
    with RawStream(gated, chat_body("ab", script={"end": "error"}, stream=True)) as client:
        gated.grant(3)
        client.read_until(b'b"},"logprobs"')
        gated.grant(1)
        rest = client.read_all()
    assert b'"message":"the logits are not finite","type":"server_error"' in rest
    assert b'"code":"engine_error"' in rest
    assert b"data: [DONE]\n\n" in rest
    assert b'"finish_reason":"' not in rest


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        ({"end": "error"}, 500, "the logits are not finite"),
        ({"end": "reject"}, 400, "the engine does not take this"),
        # An id that the model has and the tokenizer has not: a fault of ours, whose text stays in the log.
        ({"tokens": [400]}, 500, "internal error; the server's log has the details"),
    ],
)
def test_fault_before_the_first_token_has_a_real_status(
    server: Server, script: dict, status: int, message: str
) -> None:
    body = chat_body("", script=script, stream=True)
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == message


def test_slow_prefill_is_kept_alive_by_comments(tmp_path: Path) -> None:
    with (
        serving(tmp_path, gated=True, ping_interval_s=0.02) as server,
        RawStream(server, chat_body("x", script={"prefill": 2}, stream=True)) as client,
    ):
        head = client.read_until(b": ping")
        assert b"200 OK" in head
        assert b"data:" not in head
        client.read_until(b": ping")
        server.grant(4)
        rest = client.read_all()
    assert b'"content":"x"' in rest
    assert b"data: [DONE]\n\n" in rest


def test_slow_reader_holds_nobody_up(server: Server) -> None:
    """A client that reads nothing: its answer is made and waits, and the next request is answered."""
    with RawStream(server, chat_body("z" * 1500, stream=True), receive_bytes=2048) as idle:
        idle.read_until(b"200 OK")
        wait_for(lambda: server.engine.num_requests == 0)
        assert frames(stream(server))[-1] == "[DONE]"
        assert b"[DONE]" in idle.read_all()


def test_progress_of_a_prompt_comes_if_asked_for(gated: Server) -> None:
    """Here a step of prefill counts as one token; the numbers grow, and text follows."""
    body = chat_body("x", script={"prefill": 3}, stream=True, return_progress=True)
    with RawStream(gated, body) as client:
        client.read_until(b"200 OK")
        for processed in (1, 2):
            gated.grant(1)
            client.read_until(b'"processed":%d' % processed)
        gated.grant(3)
        rest = client.read_all()
    assert b'"content":"x"' in rest
    assert b"data: [DONE]\n\n" in rest


def test_slots_tell_of_those_under_way(gated: Server) -> None:
    with (
        RawStream(gated, chat_body("a", script={"prefill": 9}, stream=True)),
        RawStream(gated, chat_body("b", stream=True)),
    ):
        wait_for(lambda: gated.engine.num_requests == 2)

        def shown() -> list[dict[str, Any]]:
            return [slot for slot in httpx.get(f"{gated.url}/slots").json() if "id_task" in slot]

        gated.grant(1)
        wait_for(lambda: (gated.grant(1), len(shown()))[1] == 2)
        running, waiting = shown()
    assert (running["is_processing"], running["is_waiting"]) == (True, False)
    assert (waiting["is_processing"], waiting["is_waiting"]) == (False, True)
    assert running["n_prompt_tokens_processed"] >= 1
