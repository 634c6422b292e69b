"""Thoughts and the answer after them, apart; and the dialect of a model, found in its chat template."""

# ruff: noqa: RUF001 (DeepSeek writes its markers with a fullwidth bar)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tool_parsers import FUNCTIONS, calls_in, cut, read
from tool_texts import WRITERS

from isthmus.errors import UsageError
from isthmus.server.dialect import Dialect
from isthmus.server.events import Content, Event, Reasoning, joined
from isthmus.tokenizer import Segment

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"

# dialect of the thoughts -> (before, after) them
TAGS = {
    "think": ("<think>\n", "\n</think>\n\n"),
    "mistral": ("[THINK]", "[/THINK]"),
    "harmony": (ANALYSIS, "<|end|>" + FINAL),
}


def parse(dialect: Dialect, text: str, *, inside: bool = False) -> list[Event]:
    return joined(read(dialect.parser(FUNCTIONS, inside=inside), [text]))


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("inside", [False, True])
def test_thoughts_and_answer(name: str, inside: bool) -> None:
    """A prompt that ends inside the block leaves its beginning out of the answer."""
    begin, end = TAGS[name]
    text = ("" if inside else begin) + "Hm, 1 < 2.\n\nYes." + end + "It is <b>2</b>."
    events = parse(Dialect(reasoning=name), text, inside=inside)
    assert events == [Reasoning("Hm, 1 < 2.\n\nYes."), Content("It is <b>2</b>.")]


@pytest.mark.parametrize("name", TAGS)
def test_an_answer_without_thoughts_is_content(name: str) -> None:
    text = "Two. The tags </think> and <think> may be spoken of.\n"
    assert parse(Dialect(reasoning=name), text) == [Content(text)]


@pytest.mark.parametrize("name", TAGS)
def test_thoughts_that_never_end_are_no_answer(name: str) -> None:
    assert parse(Dialect(reasoning=name), "still thinking", inside=True) == [Reasoning("still thinking")]


def test_an_empty_block_of_thoughts() -> None:
    assert parse(Dialect(reasoning="think"), "<think>\n\n</think>\n\nHello") == [Content("Hello")]


def test_the_prompts_tag_may_be_repeated() -> None:
    events = parse(Dialect(reasoning="think"), "<think>\nhm</think>a", inside=True)
    assert events == [Reasoning("hm"), Content("a")]


@pytest.mark.parametrize("tools", WRITERS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_thoughts_then_calls_in_any_pieces(tools: str, data: st.DataObject) -> None:
    parser, write = WRITERS[tools]
    reasoning = "harmony" if parser == "harmony" else "think"
    begin, end = TAGS[reasoning]
    if reasoning == "harmony":
        end = "<|end|><|start|>assistant"
    text = begin + "I call get_weather." + end + write([("get_weather", {"city": "Köln"})])
    answer = Dialect(parser, reasoning).parser(FUNCTIONS, inside=False)
    events = joined(read(answer, cut(text, data.draw(st.lists(st.integers(0, 10_000), max_size=20)))))
    assert events[0] == Reasoning("I call get_weather.")
    assert calls_in(events) == [("get_weather", {"city": "Köln"})]
    assert not any(isinstance(event, Content) for event in events)


@pytest.mark.parametrize("name", TAGS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_however_the_text_is_cut_the_events_are_the_same(name: str, data: st.DataObject) -> None:
    begin, end = TAGS[name]
    pieces = st.sampled_from([begin, end, begin.strip(), end.strip(), "text", " \n", "<", "[", "<|start|>"])
    text = "".join(data.draw(st.lists(pieces, max_size=6)))
    inside = data.draw(st.booleans())
    dialect = Dialect(reasoning=name)
    places = data.draw(st.lists(st.integers(0, 10_000), max_size=20))
    assert joined(read(dialect.parser(None, inside=inside), cut(text, places))) == parse(
        dialect, text, inside=inside
    )


def test_harmony_preamble_is_content_and_the_call_a_call() -> None:
    text = (
        ANALYSIS + "need weather<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "x"}'
    )
    events = parse(Dialect("harmony", "harmony"), text)
    assert events[:2] == [Reasoning("need weather"), Content("I look it up.")]
    assert calls_in(events) == [("get_weather", {"city": "x"})]


def test_without_tools_a_call_is_text() -> None:
    text = WRITERS["hermes"][1]([("get_weather", {})])
    parser = Dialect("hermes", "think").parser(None, inside=False)
    assert joined(read(parser, [text])) == [Content(text)]


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ('<think> </think> <tool_call>{"name"', "hermes", "think"),
        ("<tool_call>\n<function=", "hermes", None),
        ("<tool_call>\n<function=f>\n<parameter=k>", "qwen3_coder", None),
        ("<think></think><tool_call>f <arg_key>k</arg_key>", "glm45", "think"),
        ('<minimax:tool_call><invoke name="f"></think>', "minimax_m2", "think"),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("</think> <｜tool▁calls▁begin｜> ```json", "deepseek_v3", "think"),
        ("</think> <｜tool▁calls▁begin｜>", "deepseek_v31", "think"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|start_header_id|> {'\"parameters\": '}", "llama3_json", None),
        ("<|start_header_id|>", None, None),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
        ("<|im_start|>", None, None),
    ],
)
def test_a_template_shows_its_dialect(template: str, tools: str | None, reasoning: str | None) -> None:
    assert Dialect.of("{{ tools }}" + template) == Dialect(tools, reasoning)


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    """In the syntax that it writes earlier calls in, if it has one; else in that of Hermes."""
    assert Dialect.of("<|im_start|>") == Dialect("hermes", None, in_words=True)
    assert Dialect.of("[TOOL_CALLS] {{ tool_calls }}") == Dialect("mistral", None, in_words=True)


def test_a_flag_overrides_what_the_template_shows() -> None:
    template = "{{ tools }} <tool_call> </think>"
    assert Dialect.of(template, "llama3_json", "none") == Dialect("llama3_json", None)
    with pytest.raises(UsageError, match="--tool-parser 'gpt': the parsers are auto, none, hermes"):
        Dialect.of("", "gpt")
    with pytest.raises(UsageError, match="--reasoning-parser"):
        Dialect.of("", reasoning_parser="hermes")


@pytest.mark.parametrize(
    ("end", "inside"),
    [
        ([("<|im_start|>assistant\n<think>\n", True)], True),
        ([("<|im_start|>assistant\n<think>\n\n</think>\n\n", True)], False),
        ([("<|im_start|>assistant\n", True)], False),
        ([("<|im_start|>user\n", True), ("<think>", False)], False),  # a user's own words
    ],
)
def test_a_prompt_may_end_inside_the_thoughts(end: list[tuple[str, bool]], inside: bool) -> None:
    assert Dialect(reasoning="think").begins_inside([Segment(*each) for each in end]) is inside
