"""The openai client against `/v1/responses`, and the order of its events."""

import json
from typing import Any

import httpx
import openai
import pytest
from harness import Server
from test_anthropic import events
from test_bad_input import assert_shape

SAY = json.dumps({"say": "Hello there"})


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": SAY} | fields


def test_whole_answer(server: Server) -> None:
    response = server.client().responses.create(**body(metadata={"a": "b"}))
    assert response.id.startswith("resp_")
    assert (response.status, response.output_text, response.metadata) == (
        "completed",
        "Hello there",
        {"a": "b"},
    )
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == 11
    assert response.usage.total_tokens == response.usage.input_tokens + 11
    assert response.store is False


def test_stream_helper_ends_with_the_same_response(server: Server) -> None:
    with server.client().responses.stream(**body()) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Hello there"


def test_order_of_the_events(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json=body(stream=True))
    raw = answer.content
    assert raw.endswith(b"data: [DONE]\n\n")
    seen = events(raw.removesuffix(b"data: [DONE]\n\n"))
    names = [name.removeprefix("response.") for name, _ in seen]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [data["sequence_number"] for _, data in seen] == list(range(len(seen)))
    item = seen[-2][1]["item"]
    assert seen[-1][1]["response"]["output"] == [item]
    assert {data["item_id"] for _, data in seen if "item_id" in data} == {item["id"]}


def test_cut_answer_is_incomplete(server: Server) -> None:
    response = server.client().responses.create(**body(max_output_tokens=3))
    assert (response.status, response.output_text) == ("incomplete", "Hel")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": SAY}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": SAY}]}],
        [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]},
            {"role": "user", "content": SAY},
        ],
    ],
)
def test_items(server: Server, given: list) -> None:
    response = server.client().responses.create(**body(input=given, instructions="Be kind"))
    assert response.output_text == "Hello there"


def test_fault_in_the_stream_is_an_error_event_then_done(gated: Server) -> None:
    gated.grant(3)
    given = json.dumps({"say": "ab", "end": "error"})
    with httpx.stream("POST", f"{gated.url}/v1/responses", json=body(input=given, stream=True)) as answer:
        lines = answer.iter_lines()
        while "output_text.delta" not in next(lines):
            pass
        gated.grant(1)
        rest = "\n".join(lines)
    assert 'event: error\ndata: {"type":"error","sequence_number":' in rest
    assert '"message":"the logits are not finite"' in rest
    assert rest.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            ("input", value)
            for value in (None, [], 7, [{"type": "item_reference", "id": "x"}], [{"role": "x"}])
        ],
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("truncation", "auto"),
        ("conversation", "conv_1"),
        ("max_output_tokens", 0),
        ("temperature", -1),
        ("top_p", 2),
        ("tools", [{"type": "web_search"}]),
        ("stream", 1),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_field_is_named(server: Server, field: str, value: Any) -> None:
    error = assert_shape(httpx.post(f"{server.url}/v1/responses", json=body(**{field: value})), 400)
    assert error["param"].partition("[")[0].partition(".")[0] == field
    assert server.client().responses.create(**body()).output_text == "Hello there"


def test_errors_reach_the_client_as_its_own(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client().responses.create(**body(model="gpt-4o"))
    with pytest.raises(openai.BadRequestError, match="context"):
        server.client().responses.create(**body(input="x" * 5000))
