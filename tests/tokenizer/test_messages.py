"""Messages that cannot be meant, and the default templates of files that carry none."""

import re
from typing import Any

import pytest

from isthmus.errors import UsageError
from isthmus.tokenizer import ChatTemplate, Tokenizer, TokenizerWarning
from isthmus.tokenizer.messages import check_messages, check_tools

from .vocabularies import byte_level

_USER = {"role": "user", "content": "x"}


def _call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]}


_BAD: dict[str, tuple[Any, str]] = {
    "none at all": ([], "messages is empty"),
    "a text": ("hello", "messages must be a list of messages, got str"),
    "one message alone": (_USER, "messages must be a list of messages, got dict"),
    "a message that is a text": (["hello"], "messages[0] must be an object with role and content, got str"),
    "an unknown role": (
        [{"role": "wizard", "content": "x"}],
        "messages[0].role is 'wizard'; it must be one of system",
    ),
    "a role that is a list": ([{"role": ["user"], "content": "x"}], "messages[0].role is ['user']"),
    "no role": ([_USER, {"content": "x"}], "messages[1].role is None"),
    "null content": ([{"role": "user", "content": None}], "messages[0].content is null"),
    "content a number": (
        [{"role": "user", "content": 5}],
        "messages[0].content must be a text or a list of parts",
    ),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        "messages[0].content[0] is of type 'image_url'; only 'text' parts are supported",
    ),
    "a part that is a text": (
        [{"role": "user", "content": ["x"]}],
        "messages[0].content[0] is of type 'str'",
    ),
    "a part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages[0].content[0].text must be a text, got NoneType",
    ),
    "a result without a call": (
        [_USER, {"role": "tool", "content": "x"}],
        "messages[1] is a tool's result, but no assistant message before it has tool_calls",
    ),
    "a result of another call": (
        [_USER, _call(name="f"), {"role": "tool", "content": "x", "tool_call_id": "c2"}],
        "messages[2].tool_call_id is 'c2', which no tool call before it has as id",
    ),
    "a call by a user": (
        [{"role": "user", "content": "x", "tool_calls": []}],
        "only an assistant message may have",
    ),
    "a call without a name": (
        [_USER, _call(arguments="{}")],
        "messages[1].tool_calls[0].function.name is missing",
    ),
    "arguments that are no JSON": ([_USER, _call(name="f", arguments="{")], "function.arguments is no JSON"),
    "arguments that are a list": (
        [_USER, _call(name="f", arguments="[1]")],
        "function.arguments must be a JSON object, got list",
    ),
}


@pytest.mark.parametrize("case", _BAD)
def test_bad_messages(case: str) -> None:
    messages, said = _BAD[case]
    with pytest.raises(UsageError, match=re.escape(said)):
        check_messages(messages)


@pytest.mark.parametrize("tools", ["x", [{}], ["x"], [{"type": "function", "function": {"name": 5}}]])
def test_bad_tools(tools: Any) -> None:
    with pytest.raises(UsageError, match="tools"):
        check_tools(tools)


def test_messages_are_copied_and_arguments_become_objects() -> None:
    messages = [
        _USER,
        _call(name="f", arguments='{"a": 1}'),
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
    ]
    checked = check_messages(messages)
    assert checked[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert checked[0] is not messages[0]


def test_developer_is_system_for_a_template_that_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    for source, role in (
        ("{{ messages[0].role }}", "system"),
        ("{% if messages[0].role == 'developer' %}developer{% endif %}", "developer"),
    ):
        chat = ChatTemplate(source, {})
        assert chat.render(messages)[0].text == role
        chat.close()


@pytest.mark.parametrize(
    ("control", "name", "prompt"),
    [
        (
            ["<|im_start|>", "<|im_end|>"],
            "ChatML",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            ["<B>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
            "Llama 3",
            "<B><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU"
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            ["<B>", "<E>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"],
            "DeepSeek",
            "<B>S<\uff5cUser\uff5c>U<\uff5cAssistant\uff5c>",
        ),
        (["<B>", "<E>", "[INST]", "[/INST]"], "Mistral", "<B>[INST] S[/INST][INST] U[/INST]"),
        (
            ["<B>", "<E>"],
            "ChatML",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=["ChatML", "Llama 3", "DeepSeek", "Mistral", "none of them"],
)
def test_a_file_without_a_template_gets_its_familys_with_a_warning(
    control: list[str], name: str, prompt: str
) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(control=control))
    with pytest.warns(
        TokenizerWarning, match=rf"tokenizer.chat_template is missing: .* in the {name} format"
    ):
        chat = ChatTemplate.for_tokenizer(tokenizer)
    segments = chat.render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    chat.close()
    assert "".join(segment.text for segment in segments) == prompt
