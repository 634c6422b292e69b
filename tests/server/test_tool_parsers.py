"""Tool calls in answers: every dialect, however the text arrives, and what is no call stays text."""

# ruff: noqa: RUF001 (DeepSeek writes its markers with a fullwidth bar)

import json
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_texts import AFTER_CONTENT, JSON_ARGUMENTS, WRITERS, Call

from isthmus.server.events import Content, Event, Parser, ToolArguments, ToolCall, ToolCallBroken, joined
from isthmus.server.tools import PARSERS

FUNCTIONS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "filters": {"type": "object"},
            "tags": {"type": "array"},
            "exact": {"type": ["boolean", "null"]},
        },
    },
}
MARKERS = sorted({marker for parser in PARSERS.values() for marker in (*parser.markers, *parser.begins)})


def parser_of(dialect: str) -> Parser:
    ids = count()
    return PARSERS[dialect](FUNCTIONS, lambda: f"id{next(ids)}")


def read(parser: Parser, pieces: list[str]) -> list[Event]:
    return [event for piece in pieces for event in parser.push(piece)] + list(parser.finish())


def parse(dialect: str, text: str) -> list[Event]:
    return joined(read(parser_of(dialect), [text]))


def calls_in(events: list[Event]) -> list[Call]:
    calls = [event for event in events if isinstance(event, ToolCall)]
    arguments = {call.index: "" for call in calls}
    for event in events:
        if isinstance(event, ToolArguments):
            arguments[event.index] += event.text
    return [(call.name, json.loads(arguments[call.index])) for call in calls]


def content_in(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


WEATHER: Call = ("get_weather", {"city": "Köln", "days": 3})
SEARCH: Call = ("search", {"query": 'a {b} "c" \\ \n d', "filters": {"n": [1, {"deep": None}]}, "tags": []})


@pytest.mark.parametrize("dialect", WRITERS)
def test_two_calls(dialect: str) -> None:
    parser, write = WRITERS[dialect]
    events = parse(parser, write([WEATHER, SEARCH]))
    assert calls_in(events) == [WEATHER, SEARCH]
    assert content_in(events) == ""
    assert [event.index for event in events if isinstance(event, ToolCall)] == [0, 1]


@pytest.mark.parametrize("dialect", WRITERS)
def test_a_call_without_arguments(dialect: str) -> None:
    parser, write = WRITERS[dialect]
    assert calls_in(parse(parser, write([("get_weather", {})]))) == [("get_weather", {})]


@pytest.mark.parametrize("dialect", AFTER_CONTENT)
def test_content_before_a_call_ends_without_the_space_between(dialect: str) -> None:
    parser, write = WRITERS[dialect]
    events = parse(parser, "Let me look.\n\n" + write([WEATHER]))
    assert events[0] == Content("Let me look.")
    assert calls_in(events) == [WEATHER]


@pytest.mark.parametrize("dialect", WRITERS)
def test_plain_text_is_content_to_the_letter(dialect: str) -> None:
    text = '  An answer {"name": "Alice"} with <b>tags</b>, [lists] and an end. \n'
    assert parse(WRITERS[dialect][0], text) == [Content(text)]


@pytest.mark.parametrize("dialect", WRITERS)
def test_arguments_are_announced_before_they_are_complete(dialect: str) -> None:
    """A client sees the name, and then the arguments grow: a long file does not come all at once."""
    parser, write = WRITERS[dialect]
    text = write([("search", {"query": "x" * 100})])
    events = parser_of(parser).push(text[: text.index("xxx") + 50])
    assert any(isinstance(event, ToolCall) for event in events)
    assert "x" * 30 in "".join(event.text for event in events if isinstance(event, ToolArguments))


@pytest.mark.parametrize("dialect", JSON_ARGUMENTS)
@pytest.mark.parametrize("marker", MARKERS)
def test_markers_inside_strings_are_text(dialect: str, marker: str) -> None:
    parser, write = WRITERS[dialect]
    call = ("search", {"query": f"what does {marker} mean? {marker}"})
    assert calls_in(parse(parser, write([call, WEATHER]))) == [call, WEATHER]


_ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats(-1e9, 1e9) | _ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
_PLACES = st.lists(st.integers(0, 10_000), max_size=30)


@st.composite
def _calls(draw: st.DrawFn, dialect: str) -> list[Call]:
    if dialect in JSON_ARGUMENTS:
        arguments = st.dictionaries(_ANY_TEXT, _JSON, max_size=3)
    else:  # a value is text up to a tag, and its JSON type comes from the schema
        plain = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<"), max_size=12)
        arguments = st.fixed_dictionaries(
            {},
            optional={
                "query": plain,
                "filters": st.dictionaries(
                    plain, _JSON.filter(lambda value: "<" not in repr(value)), max_size=2
                ),
                "tags": st.lists(st.integers(), max_size=3),
                "exact": st.none() | st.booleans(),
            },
        )
    return draw(st.lists(st.tuples(st.just("search"), arguments), min_size=1, max_size=3))


@pytest.mark.parametrize("dialect", WRITERS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_calls_in_any_pieces(dialect: str, data: st.DataObject) -> None:
    parser, write = WRITERS[dialect]
    calls = data.draw(_calls(dialect))
    text = write(calls)
    events = joined(read(parser_of(parser), cut(text, data.draw(_PLACES))))
    assert calls_in(events) == calls
    assert content_in(events) == ""


@pytest.mark.parametrize("dialect", WRITERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_however_the_text_is_cut_the_events_are_the_same(dialect: str, data: st.DataObject) -> None:
    """Also where it is no good: pieces of calls in any order, cut off anywhere."""
    parser, write = WRITERS[dialect]
    good = write([WEATHER, SEARCH])
    start, end = data.draw(st.tuples(st.integers(0, len(good)), st.integers(0, len(good))))
    pieces = st.sampled_from([good, good[:end], good[start:], *MARKERS, "{", '"', "}", "\n", " ", "text"])
    text = "".join(data.draw(st.lists(pieces, max_size=6)))
    events = joined(read(parser_of(parser), cut(text, data.draw(_PLACES))))
    assert events == parse(parser, text)
    assert all(event.text for event in events if not isinstance(event, ToolCall))
    calls_in(events)  # whatever came, arguments are JSON


@pytest.mark.parametrize("dialect", WRITERS)
def test_every_beginning_of_a_call_is_content_or_a_call(dialect: str) -> None:
    """An answer cut off by max_tokens: no text is lost, and no half call is taken for one."""
    parser, write = WRITERS[dialect]
    text = write([SEARCH])
    for end in range(len(text)):
        events = parse(parser, text[:end])
        assert calls_in(events) == [SEARCH] or content_in(events) == text[:end]


_BROKEN = {
    "hermes": [
        "<tool_call>\nI cannot\n</tool_call>",
        '<tool_call>{"arguments": {"city": "x"}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {city: 1}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": "none"}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {}} </tool_cal>',
        '<tool_call>["get_weather"]</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        "<tool_call>",
    ],
    "qwen3_coder": [
        "<tool_call>\n<parameter=city>\nx\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=get_weather\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nx",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nx\n</parameter>\noops",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>none",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
    ],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"],
    "kimi_k2": ["<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>1"],
    "glm45": ["<tool_call>f\nno keys</tool_call>", "<tool_call>f\n<arg_key>a</arg_key>b</tool_call>"],
    "minimax_m2": [
        "<minimax:tool_call>\nnone\n</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="f\n</invoke>',
        '<minimax:tool_call>\n<invoke name="f">\nno parameters</invoke>',
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">b',
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">b</parameter>\noops',
    ],
    "mistral": ['[TOOL_CALLS] [{"name": "f"', "[TOOL_CALLS]", '[TOOL_CALLS]f[ARGS]["x"]'],
    "llama3_json": ['{"name": "Alice", "parameters": {}}', '{"city": "Köln"}', "{}", "{"],
    "harmony": ["<|channel|>commentary to=functions.f <|constrain|>json<|message|>nothing<|call|>"],
}


@pytest.mark.parametrize(
    ("dialect", "text"), [(name, text) for name, texts in _BROKEN.items() for text in texts]
)
def test_a_malformed_call_is_content(dialect: str, text: str) -> None:
    assert parse(dialect, text) == [Content(text)]
    assert "".join(map(content_in, [parse(dialect, "Well: " + text)])) == "Well: " + text


def test_a_call_that_breaks_after_it_was_sent_stays_sent() -> None:
    """`joined` takes back only what it still has."""
    parser = parser_of("hermes")
    begin = '<tool_call>{"name": "search", "arguments": {"query": '
    sent = joined(parser.push(begin))
    assert sent == [ToolCall(0, "id0", "search"), ToolArguments(0, '{"query": ')]
    later = joined([*parser.push("oops}</tool_call>"), *parser.finish()])
    assert later == [ToolCallBroken(0, begin), Content("oops}</tool_call>")]
    assert joined([*sent, *later]) == [Content(begin + "oops}</tool_call>")]


def test_a_good_call_after_a_malformed_one() -> None:
    text = '<tool_call>{"name": "search", "arguments": {oops}}</tool_call>'
    events = parse("hermes", text + hermes_weather)
    assert content_in(events) == text
    assert calls_in(events) == [WEATHER]


hermes_weather = WRITERS["hermes"][1]([WEATHER])


def test_keys_of_a_call_in_any_order_and_others_beside_them() -> None:
    text = (
        '<tool_call>{"type": "function", "arguments": {"city": "Köln", "days": 3}, "name": "get_weather"}'
        "</tool_call>"
    )
    assert calls_in(parse("hermes", text)) == [WEATHER]
    assert calls_in(parse("hermes", '<tool_call>{"name": "get_weather"}</tool_call>')) == [
        ("get_weather", {})
    ]


def test_a_line_end_inside_a_string_is_escaped() -> None:
    """Models write it, JSON forbids it."""
    text = '<tool_call>{"name": "search", "arguments": {"query": "a\nb\tc"}}</tool_call>'
    assert calls_in(parse("hermes", text)) == [("search", {"query": "a\nb\tc"})]


def test_kimi_keeps_the_ids_that_the_model_wrote() -> None:
    events = parse("kimi_k2", WRITERS["kimi_k2"][1]([WEATHER, SEARCH]))
    assert [event.id for event in events if isinstance(event, ToolCall)] == [
        "functions.get_weather:0",
        "functions.search:1",
    ]


def test_mistral_ids_are_nine_letters_or_digits() -> None:
    events = list(PARSERS["mistral"](FUNCTIONS).push(WRITERS["mistral"][1]([WEATHER])))
    (call,) = [event for event in events if isinstance(event, ToolCall)]
    assert len(call.id) == 9
    assert call.id.isalnum()
    with_id = parse("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "x"}')
    assert with_id[0] == ToolCall(0, "abcdefghi", "get_weather")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("three", "three"),  # not what the schema says: the client decides
        ("3.5", "3.5"),
    ],
)
def test_xml_arguments_have_the_types_of_the_schema(text: str, value: Any) -> None:
    for dialect in ("qwen3_coder", "glm45", "minimax_m2"):
        written = WRITERS[dialect][1]([("get_weather", {"city": "007", "days": text})])
        assert calls_in(parse(dialect, written)) == [("get_weather", {"city": "007", "days": value})]


@pytest.mark.parametrize(
    ("text", "value"), [("True", True), ("false", False), ("None", None), ("null", None)]
)
def test_xml_arguments_in_python_spelling(text: str, value: Any) -> None:
    written = WRITERS["qwen3_coder"][1]([("search", {"exact": text})])
    assert calls_in(parse("qwen3_coder", written)) == [("search", {"exact": value})]


def test_llama_calls_only_functions_that_it_was_given() -> None:
    answer = '{"name": "unknown", "parameters": {"city": "Köln"}}'
    assert parse("llama3_json", answer) == [Content(answer)]
    assert calls_in(parse("llama3_json", '<|python_tag|>{"name": "search", "parameters": {}}')) == [
        ("search", {})
    ]
