"""Answers that go on from the end of the conversation's last message, in every protocol.

On the demo model: what goes on from a message is what goes on from its rendered prompt, as a completion.
"""

from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from harness import Server, chat_body, say
from serve_process import Serve

QUESTION = {"role": "user", "content": "Name three colours."}
BEGUN = {"role": "assistant", "content": "Sure! Three colours are red,"}
PROMPT = "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"
LIMIT = 8


@pytest.fixture(scope="module")
def url(demo: Serve) -> str:
    return demo.wait_ready().removesuffix("/v1")


def post(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def continued(url: str) -> str:
    """What follows the beginning, by the model's own tokens."""
    ids = post(url, "/tokenize", messages=[QUESTION, BEGUN])["tokens"]
    answer = post(url, "/v1/completions", prompt=ids, max_tokens=LIMIT, temperature=0)
    return answer["choices"][0]["text"]


def rendered(url: str, *messages: dict[str, Any], **fields: Any) -> str:
    prompt = post(url, "/apply-template", messages=list(messages), **fields)["prompt"]
    return prompt[prompt.index("<|im_start|>user") :]  # the demo's template has a system message of its own


@pytest.mark.parametrize(
    ("last", "fields", "end"),
    [
        (BEGUN, {}, BEGUN["content"]),
        (BEGUN, {"continue_final_message": True}, BEGUN["content"]),
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": False}, BEGUN["content"]),
        (BEGUN, {"continue_final_message": False}, f"{BEGUN['content']}<|im_end|>\n<|im_start|>assistant\n"),
        (BEGUN, {"add_generation_prompt": True}, f"{BEGUN['content']}<|im_end|>\n<|im_start|>assistant\n"),
        (BEGUN, {"add_generation_prompt": False}, f"{BEGUN['content']}<|im_end|>\n"),
        ({"role": "assistant", "content": ""}, {}, ""),
        ({"role": "assistant", "content": ""}, {"continue_final_message": True}, ""),
    ],
)
def test_how_a_prompt_ends(url: str, last: dict, fields: dict, end: str) -> None:
    assert rendered(url, QUESTION, last, **fields) == PROMPT + end


def test_whole_and_streamed(url: str, continued: str) -> None:
    assert continued.startswith(" ")  # not trimmed: it stands behind a comma
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [QUESTION, BEGUN],
        "max_tokens": LIMIT,
        "temperature": 0,
    }
    for extra in (None, {"continue_final_message": True, "add_generation_prompt": False}):
        answer = client.chat.completions.create(**asked, extra_body=extra)
        assert answer.choices[0].message.content == continued
        chunks = client.chat.completions.create(**asked, stream=True, extra_body=extra)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == continued
    client.close()


def test_anthropics_prefill(url: str, continued: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(
            model="demo", messages=[QUESTION, BEGUN], max_tokens=LIMIT, extra_body={"temperature": 0}
        )
    assert [block.text for block in answer.content if block.type == "text"] == [continued]


def test_ollamas(url: str, continued: str) -> None:
    options = {"temperature": 0, "num_predict": LIMIT}
    with ollama.Client(host=url) as client:
        answer = client.chat("demo", [QUESTION, BEGUN], options=options)
    assert answer.message.content == continued


def test_a_response_is_an_item_of_its_own(url: str, continued: str) -> None:
    answer = post(url, "/v1/responses", input=[QUESTION, BEGUN], max_output_tokens=LIMIT, temperature=0)
    assert answer["output"][0]["content"][0]["text"] != continued
    whole = post(url, "/tokenize", messages=[QUESTION, BEGUN], add_generation_prompt=True)["count"]
    assert answer["usage"]["input_tokens"] == whole


def test_an_answer_that_is_held_to_a_form_is_a_new_one(url: str) -> None:
    """Of the message at the end a part is written already, of which its grammar knows nothing."""
    form = {"response_format": {"type": "json_object"}}
    assert rendered(url, QUESTION, BEGUN, **form).endswith("<|im_start|>assistant\n")


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("last", "fields", "said"),
    [
        (BEGUN, {"add_generation_prompt": True}, "exclude each other"),
        (QUESTION, {}, "a last message of the assistant"),
        (BEGUN | {"tool_calls": [CALL]}, {}, "without tool_calls"),
        (BEGUN, {"response_format": {"type": "json_object"}}, "response_format"),
        (BEGUN, {"grammar": {"syntax": "regex", "definition": "a"}}, "grammar"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template", "/tokenize"])
def test_what_cannot_be_continued_is_refused(
    server: Server, path: str, last: dict, fields: dict, said: str
) -> None:
    body = {"messages": [QUESTION, last], "continue_final_message": True} | fields
    answer = httpx.post(server.url + path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("continue_final_message", "invalid_value")
    assert said in error["message"]


def test_calls_and_results_at_the_end_are_answered_as_before(server: Server) -> None:
    turns = [QUESTION, {"role": "assistant", "content": "x", "tool_calls": [CALL]}]
    for messages in (turns, [*turns, {"role": "tool", "tool_call_id": "1", "content": "y"}], say("ok")):
        httpx.post(server.url + "/v1/chat/completions", json=chat_body() | {"messages": messages})
        assert server.template.asked["continue_final_message"] is False
        assert server.template.asked["add_generation_prompt"] is None


@pytest.mark.parametrize("field", ["echo", "add_special_tokens"])
def test_fields_of_completions_that_would_change_a_chat_are_refused(server: Server, field: str) -> None:
    answer = httpx.post(server.url + "/v1/chat/completions", json=chat_body() | {field: True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/apply-template", "/tokenize"])
def test_what_would_make_another_prompt_is_refused_there_too(server: Server, path: str) -> None:
    answer = httpx.post(server.url + path, json=chat_body() | {"chat_template": "{{ 1 }}"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template"
