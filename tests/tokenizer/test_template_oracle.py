"""Rendered prompts against transformers' apply_chat_template."""

# ruff: noqa: RUF001 (DeepSeek writes its markers with a fullwidth bar)

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from isthmus.errors import TemplateError
from isthmus.tokenizer import ChatTemplate

from .dialects import DIALECTS, source, template, tokenizer

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a <city> [today]",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Köln <3"}},
}

_CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Why is the sky blue?"}],
    "system and history": [
        {"role": "system", "content": "Answer briefly. 1 < 2 & [x]"},
        {"role": "user", "content": "  Hi!\n"},
        {"role": "assistant", "content": "\nHello. "},
        {"role": "user", "content": "Bye | bye"},
    ],
    "thinking in history": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm <b>\n</think>\n\nanswer"},
        {"role": "user", "content": "again"},
    ],
    "thinking in the last message": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer"},
    ],
    "reasoning as a field": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": "hm", "content": "a"},
        {"role": "user", "content": "<tool_response>x</tool_response>"},
    ],
}
_TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": '{"sky": "<blue>"}'},
]


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ours(dialect: str) -> Iterator[ChatTemplate]:
    opened = template(dialect)
    yield opened
    opened.close()


def _oracle(dialect: str, chat: list[dict[str, Any]], **options: Any) -> str:
    ids = tokenizer(dialect)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
        bos_token=ids.token_text(ids.bos_id),
        eos_token=ids.token_text(ids.eos_id),
    )
    return str(
        hf.apply_chat_template(copy.deepcopy(chat), chat_template=source(dialect), tokenize=False, **options)
    )


def _text(ours: ChatTemplate, chat: list[dict[str, Any]], **options: Any) -> str:
    return "".join(segment.text for segment in ours.render(chat, **options))


@pytest.mark.parametrize("chat", _CHATS.values(), ids=_CHATS)
def test_prompts_equal_those_of_transformers(
    dialect: str, ours: ChatTemplate, chat: list[dict[str, Any]]
) -> None:
    for prompt in (True, False):
        expected = _oracle(dialect, chat, add_generation_prompt=prompt)
        assert _text(ours, chat, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("dialect", ["llama3", "qwen3"])
def test_tools_equal_those_of_transformers(dialect: str, ours: ChatTemplate) -> None:
    expected = _oracle(dialect, _TOOL_CHAT, tools=_TOOLS, add_generation_prompt=True)
    assert '"Köln <3"' in expected
    assert _text(ours, _TOOL_CHAT, tools=_TOOLS) == expected


@pytest.mark.parametrize("dialect", ["llama3", "qwen3"])
def test_tool_arguments_may_come_as_json_text(dialect: str, ours: ChatTemplate) -> None:
    chat = copy.deepcopy(_TOOL_CHAT)
    chat[1] |= {"content": None, "tool_calls": [copy.deepcopy(_CALL)]}
    chat[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Köln <3"}'
    assert _text(ours, chat, tools=_TOOLS) == _oracle(
        dialect, _TOOL_CHAT, tools=_TOOLS, add_generation_prompt=True
    )


@pytest.mark.parametrize("dialect", ["deepseek"])
def test_a_template_that_joins_arguments_gets_them_as_text(ours: ChatTemplate) -> None:
    chat = [_TOOL_CHAT[0], {"role": "assistant", "content": None, "tool_calls": [_CALL]}, _TOOL_CHAT[2]]
    call = '<｜tool▁sep｜>get_weather\n```json\n{"city": "Köln <3"}\n```<｜tool▁call▁end｜>'
    assert call in _text(ours, chat)


@pytest.mark.parametrize("dialect", ["qwen3"])
def test_options_reach_the_template(dialect: str, ours: ChatTemplate) -> None:
    chat = _CHATS["one question"]
    text = _text(ours, chat, enable_thinking=False)
    assert text == _oracle(dialect, chat, add_generation_prompt=True, enable_thinking=False)
    assert text.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("dialect", ["mistral"])
def test_what_the_template_refuses_is_said_in_its_words(ours: ChatTemplate) -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(
        TemplateError, match="refuses these messages: Conversation roles must alternate user/assistant"
    ):
        ours.render(twice)


@pytest.mark.parametrize("dialect", ["chatml"])
def test_text_parts_are_joined_for_a_template_that_expects_a_text(ours: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "<|im_start|>user\none\ntwo<|im_end|>" in _text(ours, [{"role": "user", "content": parts}])


def test_text_parts_stay_parts_for_a_template_that_loops_over_them() -> None:
    looping = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
    ours = ChatTemplate(looping, {})
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert _text(ours, [{"role": "user", "content": parts}]) == "(one)(two)"
    ours.close()


def test_helpers_that_templates_use() -> None:
    written = (
        "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %} g{% endgeneration %}"
        "{{ {'b': 1, 'a': '<é>'} | tojson }}{{ [1] | tojson(indent=1, separators=(',', ':')) }}"
        "{{ strftime_now('%%') }}"
    )
    ours = ChatTemplate(written, {})
    assert _text(ours, [{"role": "user", "content": "x"}]) == '012 g{"b": 1, "a": "<é>"}[\n 1\n]%'
    ours.close()
