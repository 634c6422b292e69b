"""Prompts that end inside the last message, against transformers' continue_final_message."""

from typing import Any

import pytest

from isthmus.errors import UsageError
from isthmus.tokenizer import ChatTemplate

from .dialects import DIALECTS, template, tokenizer
from .test_template_oracle import _oracle, _text

_CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
_ENDS: dict[str, Any] = {
    "a text": {"content": "The sky is"},
    "a blank behind it": {"content": "The sky is \n"},
    "blanks before it": {"content": "\n  The sky"},
    "symbols": {"content": '{"a": "<|x|> [b]</s>'},
    "nothing": {"content": ""},
    "thoughts beside it": {"content": "It is", "reasoning_content": "hm"},
    "thoughts in it": {"content": "<think>\nhm\n</think>\n\nIt is"},
    "parts": {"content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]},
    "its text stands elsewhere too": {"content": "Why?"},
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("end", _ENDS.values(), ids=_ENDS)
def test_prompts_equal_those_of_transformers(dialect: str, end: dict[str, Any]) -> None:
    """What transformers refuses is refused too: thoughts in the text that a template leaves out."""
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant"} | end]
    ours = template(dialect)
    try:
        expected = _oracle(dialect, _joined(chat), continue_final_message=True)
    except ValueError as refusal:
        said = str(refusal)
        with pytest.raises(UsageError, match="does not show the whole last message"):
            ours.render(chat, continue_final_message=True)
    else:
        said = ""
        assert _text(ours, chat, continue_final_message=True) == expected
    assert not said or (dialect == "deepseek" and "final message does not appear" in said)
    ours.close()


def _joined(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parts as one text: these templates expect that, and transformers prints the list."""
    last = chat[-1]["content"]
    text = last if isinstance(last, str) else "\n".join(part["text"] for part in last)
    return [chat[0], chat[-1] | {"content": text}]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_special_token_comes_from_the_text_that_is_continued(dialect: str) -> None:
    tokens, ours = tokenizer(dialect), template(dialect)
    known = sorted(tokens.special_literals - {"</think>"})  # at which templates cut
    hostile = "x" + "".join(known) + "y"
    found = []
    for content in ("xy", hostile):
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
        ids = tokens.encode_segments(ours.render(chat, continue_final_message=True))
        found.append([token for token in ids if tokens.token_text(token) in tokens.special_literals])
    ours.close()
    assert found[0] == found[1]
    assert found[0]


def test_what_a_template_prints_twice_is_whole_in_the_first_place() -> None:
    ours = ChatTemplate("{{ messages[-1].content }}|{{ messages[-1].content }}.", {})
    assert _text(ours, [{"role": "assistant", "content": "ab "}], continue_final_message=True) == "ab |ab "
    ours.close()


@pytest.mark.parametrize(
    ("last", "options", "said"),
    [
        ({"role": "user", "content": "x"}, {}, "only a message of the assistant.*'user'"),
        ({"role": "assistant", "content": "x", "tool_calls": [_CALL]}, {}, "tool_calls cannot be continued"),
        ({"role": "assistant", "content": []}, {}, "no text to continue"),
        ({"role": "assistant", "content": "x"}, {"add_generation_prompt": True}, "exclude each other"),
    ],
)
def test_what_cannot_be_continued_is_refused(last: dict, options: dict, said: str) -> None:
    ours = template("chatml")
    with pytest.raises(UsageError, match=said):
        ours.render([{"role": "user", "content": "q"}, last], continue_final_message=True, **options)
    ours.close()


def test_a_template_that_leaves_the_text_out_is_refused() -> None:
    ours = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", {})
    with pytest.raises(UsageError, match="does not show the whole last message"):
        ours.render([{"role": "assistant", "content": "x"}], continue_final_message=True)
    ours.close()
