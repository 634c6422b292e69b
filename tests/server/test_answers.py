"""What a chat asks to be held, held: random models in every dialect, read by that dialect's own parser.

The vocabularies have the dialect's markers as special tokens, as its models' do, or as plain text. The oracle
for arguments and formats is the jsonschema package.
"""

import asyncio
import json
import time
from itertools import product
from typing import Any

import jsonschema
import pytest
import torch
from test_tool_parsers import calls_in, content_in

from isthmus.engine.request import Grammar
from isthmus.engine.token_mask import VocabularyGrammars
from isthmus.server import answers
from isthmus.server.answers import Answering, Answers
from isthmus.server.dialect import Dialect
from isthmus.server.errors import ApiError
from isthmus.server.events import Content, Event, Reasoning, joined
from isthmus.server.reasoning import PARSERS as REASONING_PARSERS
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.tools import PARSERS
from isthmus.server.tools.typed import types_of
from isthmus.tokenizer import Detokenizer, Segment, Tokenizer
from tokenizer.vocabularies import byte_level

# So that strings and objects end in time: what a random model likes to write.
_FAVOURED = b'"}], \n<['

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SEARCH = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "search": SEARCH}
FORMAT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def tools(*, strict: bool | None = None) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


def _completions(texts: list[bytes], tail: bytes) -> dict[int, int]:
    """Next bytes of texts that `tail` has begun, and how much of them is there."""
    found: dict[int, int] = {}
    for text in texts:
        begun = next((n for n in range(len(text) - 1, 0, -1) if tail.endswith(text[:n])), 0)
        if begun:
            found[text[begun]] = max(begun, found.get(text[begun], 0))
    return found


class Model:
    """A vocabulary of bytes and markers, whose logits are random."""

    def __init__(self, tool_parser: str, reasoning_parser: str | None, *, special: bool = True) -> None:
        self.dialect = Dialect(tool_parser, reasoning_parser)
        markers = sorted(self.dialect.markers(with_tools=True)) if special else []
        self.tokenizer = Tokenizer.from_gguf(byte_level(user_defined=markers))
        self.grammars = VocabularyGrammars(self.tokenizer)
        self.answers = Answers(self.tokenizer, self.dialect)
        end_of_thoughts = {"think": "</think>", "mistral": "[/THINK]", "harmony": "<|end|>", None: ""}
        argument = PARSERS[tool_parser].writes.argument or ("",)
        ends = (end_of_thoughts[reasoning_parser], argument[-1].strip())  # what it completes once begun
        self._ends = [text.encode() for text in ends if text]

    def answering(self, prompt_end: str = "", **fields: Any) -> Answering:
        chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)
        inside = self.answers.dialect.begins_inside([Segment(prompt_end, True)])
        return asyncio.run(self.answers.of(chat, inside=inside))

    def write(self, answering: Answering, seed: int, max_tokens: int = 300) -> list[Event] | None:
        """The events of a random answer; None if it did not end in time."""
        assert answering.grammar is not None
        generator = torch.Generator().manual_seed(seed)
        mask = self.grammars.compile(answering.grammar)
        favoured = [each for token in _FAVOURED for each in self.tokenizer.encode_inside(chr(token))]
        special = list(range(256, self.tokenizer.vocab_size))
        detokenizer, parser = Detokenizer(self.tokenizer, shown=answering.shown), answering.parser()
        events: list[Event] = []
        tail = b""
        for _ in range(max_tokens):
            row = torch.randn(self.tokenizer.vocab_size, generator=generator)
            row[favoured] += 3
            row[special] += 4
            for next_byte, begun in _completions(self._ends, tail).items():
                row[self.tokenizer.encode_inside(chr(next_byte))] += 3 + 2 * begun
            self.grammars.mask([(mask, row)])
            token = int(row.argmax())
            assert row[token] > float("-inf"), f"no way on after {events}"
            if token in self.tokenizer.stop_ids:
                return joined([*events, *parser.push(detokenizer.finish()), *parser.finish()])
            mask.accept(token)
            tail = (tail + self.tokenizer.token_bytes(token))[-20:]
            events += parser.push(detokenizer.push(token))
        return None


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, bool], Model]:
    return {
        (name, special): Model(name, "harmony" if name == "harmony" else "think", special=special)
        for name, special in product(PARSERS, (True, False))
    }


def written(model: Model, answering: Answering, num: int = 6) -> list[list[Event]]:
    answers = [model.write(answering, seed) for seed in range(num)]
    complete = [answer for answer in answers if answer is not None]
    assert complete, "no answer ended in time"
    return complete


def check_calls(events: list[Event], *, names: set[str]) -> int:
    calls = calls_in(events)
    for name, arguments in calls:
        assert name in names
        jsonschema.validate(arguments, SCHEMAS[name])
    return len(calls)


DIALECTS = list(product(PARSERS, (True, False)))


@pytest.mark.parametrize(("name", "special"), DIALECTS)
def test_required(models: dict[tuple[str, bool], Model], name: str, special: bool) -> None:
    model = models[name, special]
    for events in written(model, model.answering(tools=tools(), tool_choice="required")):
        assert check_calls(events, names=set(SCHEMAS)) >= 1
        assert content_in(events) == ""


@pytest.mark.parametrize(("name", "special"), DIALECTS)
def test_a_named_function_is_called_once(
    models: dict[tuple[str, bool], Model], name: str, special: bool
) -> None:
    model = models[name, special]
    choice = {"type": "function", "function": {"name": "search"}}
    for events in written(model, model.answering(tools=tools(), tool_choice=choice), 4):
        assert check_calls(events, names={"search"}) == 1


@pytest.mark.parametrize(("name", "special"), DIALECTS)
def test_strict_arguments_where_the_model_may_choose(
    models: dict[tuple[str, bool], Model], name: str, special: bool
) -> None:
    """Text, or calls with arguments of the schema; never a call that is neither."""
    model = models[name, special]
    answering = model.answering(tools=tools(strict=True), parallel_tool_calls=False)
    for events in written(model, answering, 8):
        assert check_calls(events, names=set(SCHEMAS)) <= 1


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v31", "glm45"])
def test_a_model_that_may_choose_can_call(
    models: dict[tuple[str, bool], Model], name: str, special: bool
) -> None:
    """The beginning of a call is open after any text, and then nothing but a call."""
    model = models[name, special]
    mask = model.grammars.compile(model.answering(tools=tools(strict=True)).grammar)  # type: ignore[arg-type]
    begin = PARSERS[name].begins[0]
    marker = model.tokenizer.special_id(begin)
    ids = model.tokenizer.encode_inside("Well. ")
    ids += [marker] if marker is not None else model.tokenizer.encode_inside(begin)
    for token in ids:
        assert mask.allowed()[token]
        mask.accept(token)
    assert not mask.allowed()[sorted(model.tokenizer.stop_ids)].any()


@pytest.mark.parametrize("name", ["think", "mistral", "harmony", None])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("inside", [False, True])
def test_a_format_after_thoughts(name: str | None, special: bool, inside: bool) -> None:
    """Thoughts are free; the answer after them is JSON of the schema and nothing else."""
    model = Model("harmony" if name == "harmony" else "hermes", name, special=special)
    begin = "" if name is None else REASONING_PARSERS[name].markers[0]
    prompt = ("<|channel|>analysis<|message|>" if name == "harmony" else begin) if inside else "x"
    form = {"type": "json_schema", "json_schema": {"schema": FORMAT}}
    answering = model.answering(prompt, response_format=form)
    assert answering.inside is (inside and name is not None)
    answers = written(model, answering)
    for events in answers:
        jsonschema.validate(json.loads(content_in(events)), FORMAT)
        assert all(isinstance(event, Content | Reasoning) for event in events)
    if inside and name is not None:
        assert any(isinstance(events[0], Reasoning) for events in answers)


def test_a_format_or_a_call(models: dict[tuple[str, bool], Model]) -> None:
    model = models["hermes", False]
    form = {"type": "json_schema", "json_schema": {"schema": FORMAT}}
    called = set()
    for events in written(model, model.answering(tools=tools(), response_format=form), 16):
        called.add(check_calls(events, names=set(SCHEMAS)) > 0)
        if content_in(events):
            jsonschema.validate(json.loads(content_in(events)), FORMAT)
    assert called == {True, False}


@pytest.mark.parametrize(
    ("syntax", "definition", "expected"),
    [("regex", "(yes|no/maybe)", {"yes", "no/maybe"}), ("lark", 'start: "a" b\nb: "x" | "y"', {"ax", "ay"})],
)
def test_a_grammar_of_ones_own(
    models: dict[tuple[str, bool], Model], syntax: str, definition: str, expected: set[str]
) -> None:
    model = models["hermes", True]
    answering = model.answering("<think>", grammar={"syntax": syntax, "definition": definition})
    contents = {content_in(events) for events in written(model, answering, 12)}
    assert contents == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": tools()},
        {"tools": tools(), "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": tools(strict=True), "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ],
)
def test_nothing_is_held_that_was_not_asked_for(
    models: dict[tuple[str, bool], Model], fields: dict[str, Any]
) -> None:
    assert models["hermes", True].answering(**fields).grammar is None


# What llguidance has no word for beside what it has; a model of random letters keeps to the latter.
_HALF_HELD = {
    "a": {"type": "integer", "minimum": 5, "maximum": 7, "not": {"const": 6}},
    "b": {"enum": ["x", "y"]},
    "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True},
}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_without_strict_as_much_of_a_schema_is_held_as_can_be(
    models: dict[tuple[str, bool], Model], name: str
) -> None:
    """Strict, it is a 400 that names the keyword. The oracle has all but the keywords that are lacking."""
    model = models[name, True]
    schema = {
        "type": "object",
        "properties": _HALF_HELD,
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    tool: dict[str, Any] = {"type": "function", "function": {"name": "search", "parameters": schema}}
    loose = model.answering(tools=[tool], tool_choice="required")
    lacking = {"not", "uniqueItems"}
    held = {
        key: {word: value for word, value in own.items() if word not in lacking}
        for key, own in _HALF_HELD.items()
    }
    seen = 0
    for events in written(model, loose, 6):
        for _, arguments in calls_in(events):
            jsonschema.validate(arguments, schema | {"properties": held})
            seen += 1
    assert seen >= 3
    tool["function"]["strict"] = True
    with pytest.raises(ApiError, match='"not"') as caught:
        model.answering(tools=[tool], tool_choice="required")
    assert (caught.value.status, caught.value.param) == (400, "tools[0].function.parameters")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_schema_of_which_nothing_can_be_held(models: dict[tuple[str, bool], Model], name: str) -> None:
    """Strict, it is refused; else the call is still one, with arguments of any kind."""
    model = models[name, True]
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "search", "parameters": schema}}
    loose = model.answering(tools=[tool], tool_choice="required")
    assert all(calls_in(events) for events in written(model, loose, 3))
    tool["function"]["strict"] = True
    with pytest.raises(ApiError, match=r"none|\$ref") as caught:
        model.answering(tools=[tool], tool_choice="required")
    assert (caught.value.status, caught.value.param) == (400, "tools[0].function.parameters")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {}}, "required": [["a"]]},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"type": ["integer", {}]}}},
        {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"anyOf": 5}}},
        {"properties": {"a": {"anyOf": [1]}}},
    ],
)
def test_a_schema_that_is_none(
    models: dict[tuple[str, bool], Model], name: str, schema: dict[str, Any]
) -> None:
    """A 400 if it is to be held; else arguments are texts or JSON, and read as such."""
    tool: dict[str, Any] = {"type": "function", "function": {"name": "search", "parameters": schema}}
    assert models[name, True].answering(tools=[tool], tool_choice="required").grammar is not None
    assert types_of(schema, "a") <= {"string", "integer"}
    tool["function"]["strict"] = True
    with pytest.raises(ApiError) as caught:
        models[name, True].answering(tools=[tool], tool_choice="required")
    assert (caught.value.status, caught.value.param) == (400, "tools[0].function.parameters")


def test_of_many_tools_none_is_compiled_when_nobody_waits_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would find the thread that compiles taken."""

    class Slow:
        count = 0

        def compile(self, grammar: Grammar) -> None:
            self.count += 1
            time.sleep(0.01)

    monkeypatch.setattr(answers, "_PATIENCE_S", 0.05)
    model, slow = Model("hermes", None), Slow()
    monkeypatch.setattr(model.answers, "_compiler", slow)
    many = [{"type": "function", "function": {"name": f"f{n}", "parameters": SEARCH}} for n in range(200)]
    with pytest.raises(ApiError, match="could not be compiled in"):
        model.answering(tools=many, tool_choice="required")
    model.answers._thread.submit(lambda: None).result(10)
    assert slow.count < 20


def test_without_a_parser_no_call_can_be_forced() -> None:
    model = Model("hermes", None)
    model.answers = Answers(model.tokenizer, Dialect())
    with pytest.raises(ApiError, match="no parser of tool calls"):
        model.answering(tools=tools(), tool_choice="required")
