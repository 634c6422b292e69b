"""Answers under a grammar: whatever the model prefers, what it writes is what was asked for.

The oracle for JSON schemas is the jsonschema package; the vocabularies are the demo model's byte-level BPE
and a small SentencePiece one. Logits are random numbers: the worst model there is.
"""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
import torch
from hypothesis import strategies as st

from isthmus.engine.grammar import GrammarCompiler
from isthmus.engine.grammar_limits import repetitions
from isthmus.engine.llm import LLM
from isthmus.engine.request import Grammar, SamplingParams
from isthmus.engine.token_mask import VocabularyGrammars
from isthmus.errors import UsageError
from isthmus.tokenizer import Tokenizer
from tokenizer.vocabularies import byte_level, sentencepiece

# A pattern can only be met by chance; these make an end likely within a test's patience.
_ENDS = '"}], \n'
_MAX_TOKENS = 120


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """SentencePiece with words of JSON, single characters and bytes for everything else."""
    words = [
        "▁",
        "▁{",
        '{"',
        '":',
        '▁"',
        '",',
        "true",
        "▁true",
        "nu",
        "ll",
        "▁a",
        "ab",
        "a",
        '"}',
        "}]",
        "<think>",
    ]
    return Tokenizer.from_gguf(
        sentencepiece({word: -float(i) for i, word in enumerate(words)}, control=["[X]"])
    )


@pytest.fixture(scope="module")
def demo_grammars(demo: Tokenizer) -> VocabularyGrammars:
    return VocabularyGrammars(demo)


@pytest.fixture(scope="module")
def piece_grammars(pieces: Tokenizer) -> VocabularyGrammars:
    return VocabularyGrammars(pieces)


def write(tokenizer: Tokenizer, grammars: VocabularyGrammars, grammar: Grammar, seed: int) -> str | None:
    """A random model's answer, None if it was not complete in time."""
    generator = torch.Generator().manual_seed(seed)
    mask = grammars.compile(grammar)
    favoured = [
        token
        for token in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token).decode("utf-8", "replace") in _ENDS
    ]
    ids: list[int] = []
    for _ in range(_MAX_TOKENS):
        row = torch.randn(tokenizer.vocab_size + 7, generator=generator)  # rows may be padded
        row[favoured] += 4
        row[sorted(tokenizer.stop_ids)] += 6
        grammars.mask([(mask, row)])
        assert row.max() > float("-inf"), f"no way on after {tokenizer.decode(ids)!r}"
        token = int(row.argmax())
        if token in tokenizer.stop_ids:
            return tokenizer.decode(ids, skip_special=False)
        mask.accept(token)
        ids.append(token)
    return None


_SCALARS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "format": "date"},
    {"enum": ["ä", 'b"c', "<|im_end|>", 5, None]},
    {"const": {"k": [1]}},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "number"},
    {"type": ["boolean", "null"]},
]


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(
        st.sampled_from(["a", "Stadt", "x y", 'q"', "ключ"]), inner, min_size=1, max_size=3
    )
    return properties.flatmap(
        lambda given: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(given),
                "required": st.lists(st.sampled_from(sorted(given)), unique=True),
                "additionalProperties": st.just(False),
            }
        )
    )


_SCHEMAS = st.recursive(
    st.sampled_from(_SCALARS),
    lambda inner: (
        _objects(inner)
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 3)})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)})
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("vocabulary", ["demo", "piece"])
@hypothesis.given(schema=_SCHEMAS, seed=st.integers(0, 2**32))
@hypothesis.settings(max_examples=14, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_any_answer_under_a_schema_is_json_of_it(
    request: pytest.FixtureRequest, vocabulary: str, schema: dict[str, Any], seed: int
) -> None:
    tokenizer = request.getfixturevalue("demo" if vocabulary == "demo" else "pieces")
    grammars = request.getfixturevalue(f"{vocabulary}_grammars")
    answer = write(tokenizer, grammars, Grammar("json_schema", json.dumps(schema)), seed)
    if answer is not None:
        jsonschema.validate(json.loads(answer), schema)


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_mostly_complete(demo: Tokenizer, demo_grammars: VocabularyGrammars, seed: int) -> None:
    """So that the test above tests something."""
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
    assert write(demo, demo_grammars, Grammar("json_schema", json.dumps(schema)), seed) is not None


def test_json_object(demo: Tokenizer, demo_grammars: VocabularyGrammars) -> None:
    answers = [write(demo, demo_grammars, Grammar("json_object"), seed) for seed in range(3)]
    complete = [json.loads(answer) for answer in answers if answer is not None]
    assert complete
    assert all(isinstance(value, dict) for value in complete)


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar("regex", r"(Ja|Nein|Vielleicht, ü)\."), r"(Ja|Nein|Vielleicht, ü)\."),
        (Grammar("lark", 'start: "a" b+\nb: /[xy]/ "-"'), r"a([xy]-)+"),
        (
            Grammar(
                "lark",
                'start: think "</t>" %json {"type": "integer", "minimum": 7}\nthink: /[a-z ]{3}/',
            ),
            r"[a-z ]{3}</t>([789]|[1-9][0-9]+)",
        ),
    ],
)
def test_regex_and_lark(
    demo: Tokenizer, demo_grammars: VocabularyGrammars, grammar: Grammar, expected: str
) -> None:
    answers = [write(demo, demo_grammars, grammar, seed) for seed in range(5)]
    assert all(answer is not None and re.fullmatch(expected, answer) for answer in answers)
    assert len(set(answers)) > 1


def test_an_answer_ends_only_where_it_may(demo: Tokenizer, demo_grammars: VocabularyGrammars) -> None:
    mask = demo_grammars.compile(Grammar("regex", "a{2,3}"))
    ends = []
    for token in [*demo.encode_inside("a"), *demo.encode_inside("a"), *demo.encode_inside("a")]:
        ends.append(mask.allowed()[sorted(demo.stop_ids)].tolist())
        mask.accept(token)
    ends.append(mask.allowed()[sorted(demo.stop_ids)].tolist())
    assert ends == [[False] * 2, [False] * 2, [True] * 2, [True] * 2]
    assert set(mask.allowed().nonzero().flatten().tolist()) == set(demo.stop_ids)


def test_special_tokens_are_no_text(demo: Tokenizer, demo_grammars: VocabularyGrammars) -> None:
    """`<|im_start|>` in a string is its letters; the token itself would be hidden."""
    start = next(token for token in range(demo.vocab_size) if demo.token_text(token) == "<|im_start|>")
    assert not demo_grammars.compile(Grammar("regex", r"<\|im_start\|>")).allowed()[start]
    assert not demo_grammars.compile(Grammar("regex", r"(?s:.*)")).allowed()[start]
    assert demo_grammars.compile(Grammar("lark", f"start: <[{start}]>")).allowed()[start]


def test_a_token_against_the_grammar_is_refused(demo: Tokenizer, demo_grammars: VocabularyGrammars) -> None:
    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        demo_grammars.compile(Grammar("regex", "abc")).accept(demo.encode_inside("x")[0])


def test_answers_under_one_grammar_do_not_share_their_place(
    demo: Tokenizer, demo_grammars: VocabularyGrammars
) -> None:
    first, second = (demo_grammars.compile(Grammar("regex", "ab|cd")) for _ in range(2))
    first.accept(demo.encode_inside("a")[0])
    assert second.allowed()[demo.encode_inside("c")[0]]
    assert not first.allowed()[demo.encode_inside("c")[0]]


def test_white_space_is_bounded(demo: Tokenizer) -> None:
    matcher = GrammarCompiler(demo).compile(Grammar("json_object"))

    def fits(text: str) -> bool:
        ids = demo.encode_inside(text)
        return matcher.validate_tokens(ids) == len(ids)

    assert fits(json.dumps({"a": [1, {"b": None}]}))
    assert fits(json.dumps({"a": [1, {"b": None}]}, indent=4))
    assert fits('{"a":1}')
    assert not fits('{"a":   1}')
    assert not fits('{\n\n"a": 1}')


_SCHEMA_ERRORS: dict[str, tuple[Any, str]] = {
    "a keyword it has not": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "conditions": ({"if": {}, "then": {"type": "string"}}, "if"),
    "another document": ({"$ref": "http://example.com/schema"}, "example.com"),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, "none"),
    "an unknown type": ({"type": "strin"}, "strin"),
    "an unknown format": ({"type": "string", "format": "haiku"}, "haiku"),
    "a look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "nothing satisfies it": ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    "a number": (5, "an object, got 5"),
    "a list": ([], "an object"),
    "false": (False, "an object, got false"),
    "options of the library": ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    "options deeper down": ({"items": {"x-guidance": {"lenient": True}}}, "x-guidance"),
    "a pattern that explodes": ({"type": "string", "pattern": "^(a{500}){500}$"}, "250000 times"),
    "too many choices": ({"enum": list(range(100_000))}, "too big"),
}


@pytest.mark.parametrize("name", _SCHEMA_ERRORS)
def test_a_schema_that_cannot_be_held_is_refused(demo_grammars: VocabularyGrammars, name: str) -> None:
    schema, message = _SCHEMA_ERRORS[name]
    with pytest.raises(UsageError, match=re.escape(message)):
        demo_grammars.compile(Grammar("json_schema", json.dumps(schema)))


def _deep(wrap: Callable[[Any], Any]) -> Any:
    value: Any = {"type": "string"}
    for _ in range(150):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"),
        Grammar("json_schema", json.dumps(_deep(lambda inner: {"type": "array", "items": inner}))),
        Grammar("json_schema", "[" * 100_000),
        Grammar("regex", "("),
        Grammar("regex", "a{1000000}"),
        Grammar("regex", r"(x(a{100}b){100}){9}"),
        Grammar("lark", "no grammar"),
        Grammar("lark", 'start: "a'),
        Grammar("lark", "start: missing"),
        Grammar("lark", "start: start"),
        Grammar("lark", "start: /a{30000}/"),
    ],
    ids=lambda grammar: f"{grammar.kind} {grammar.text[:20]}",
)
def test_a_bad_grammar_is_refused(demo_grammars: VocabularyGrammars, grammar: Grammar) -> None:
    with pytest.raises(UsageError) as caught:
        demo_grammars.compile(grammar)
    assert "backtrace" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("abc", 1),
        (r"\d{4}-\d{2}", 4),
        ("(a{30}b){40}", 1200),
        ("(a{2}|b{3,}|c{1,5}){10}", 50),
        (r"\(a{3}\){4}", 4),
        ("((a{3}){3}){3}", 27),
        ("){9}", 9),
    ],
)
def test_repetitions_of_nested_counts(pattern: str, count: int) -> None:
    assert repetitions(pattern) == count


def test_an_engines_answer_is_of_the_grammar(alphabet_model: Path) -> None:
    """The model would go on with "bcd" whatever is asked; a bad grammar is that request's own error."""
    llm = LLM(alphabet_model, threads=1)
    free, held, bad, unsaid = (
        llm.generate(["a"] * 4, SamplingParams(temperature=0, max_tokens=3)),
        *(
            llm.generate("a", SamplingParams(temperature=0, max_tokens=9, grammar=grammar))
            for grammar in (
                Grammar("regex", "[x-z]{3}"),
                Grammar("regex", "("),
                Grammar("json_schema", '{"const": "b"}'),
            )
        ),
    )
    llm.close()
    assert [each.text for each in free] == ["bcd"] * 4
    assert re.fullmatch("[x-z]{3}", held.text)
    assert held.finish_reason == "stop"
    assert (bad.finish_reason, bad.text) == ("error", "")
    assert "unclosed group" in (bad.error or "")
    assert unsaid.text == '"b"'


def test_a_vocabulary_without_an_end_has_no_grammars() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(control=["<|a|>", "<|b|>"], eos_token_id=None))
    with pytest.raises(UsageError, match="no token that ends an answer"):
        GrammarCompiler(tokenizer)


def test_choices_are_random(demo: Tokenizer, demo_grammars: VocabularyGrammars) -> None:
    """All that a grammar allows stays possible: masks are not merely one right answer."""
    seeds = random.Random(0).sample(range(1000), 12)
    answers = {write(demo, demo_grammars, Grammar("regex", "[0-9]"), seed) for seed in seeds}
    assert len(answers) > 4
