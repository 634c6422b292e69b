"""Grammars that are made to take long or to break something: their own request ends with an error that says
why, or goes on; others never notice. Over the demo model's vocabulary; the model counts tokens up."""

import json
import re
import time
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor

from isthmus.engine import mask
from isthmus.engine.grammar_limits import GrammarThread
from isthmus.engine.loop import StepLoop
from isthmus.engine.request import Grammar, Output, Request, SamplingParams
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.engine.token_mask import GrammarMask, VocabularyGrammars
from isthmus.tokenizer import Tokenizer

PATIENCE_S = 20.0  # the longest of these takes a second or two on an idle core
CONTEXT = 128


@pytest.fixture(scope="module")
def grammars(demo: Tokenizer) -> VocabularyGrammars:
    return VocabularyGrammars(demo)


class Counting:
    """Logits that make the successor of each token the most probable, an end the least."""

    def __init__(self, demo: Tokenizer) -> None:
        self._rest = torch.zeros(demo.vocab_size)
        self._rest[sorted(demo.stop_ids)] = -30.0

    def execute(self, plan: StepPlan) -> Tensor:
        rows = [self._rest.clone() for part in plan.slices for _ in range(part.num_logits)]
        for row, part in zip(rows, (part for part in plan.slices if part.num_logits), strict=True):
            row[(part.tokens[-1] + 1) % len(row)] = 1.0
        return torch.stack(rows) if rows else torch.empty(0, len(self._rest))


def loop_of(demo: Tokenizer, grammars: VocabularyGrammars) -> StepLoop:
    scheduler = Scheduler(8 * CONTEXT // 4, 4, CONTEXT, 32, max_running=8)
    return StepLoop(Counting(demo), scheduler, demo.vocab_size, lambda: grammars)


def run(engine: StepLoop) -> dict[str, list[Output]]:
    events: dict[str, list[Output]] = {}
    end = time.monotonic() + PATIENCE_S
    while engine.has_work:
        assert time.monotonic() < end, f"still under way: {engine.stats().slots}"
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def greedy(num_tokens: int, grammar: Grammar | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, grammar=grammar)


def lark(text: str) -> Grammar:
    return Grammar("lark", text)


def _chain(name: str, body: Callable[[str], str], num: int) -> Grammar:
    rules = [f"{name}{i}: {body(f'{name}{i + 1}')}" for i in range(num)]
    return lark("\n".join([f"start: {name}0", *rules, f'{name}{num}: "x"']))


def _references(num: int, wrap: Callable[[dict[str, str]], object]) -> Grammar:
    chain = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(num)}
    return Grammar(
        "json_schema", json.dumps({"$defs": {**chain, f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"})
    )


def _nested(num: int) -> Grammar:
    schema = reduce(lambda inner, _: {"type": "array", "items": inner}, range(num), {"type": "string"})
    return Grammar("json_schema", json.dumps(schema))


# What the error of the request says; None: it goes on to its last token.
HOSTILE: dict[str, tuple[Grammar, str | None]] = {
    "counts of counts": (Grammar("regex", "(a{1,1000}){1,1000}"), "repeats something 1000000 times"),
    "rules of counts": (lark("start: x{1,1000}\nx: y{1,1000}\ny: /a/ | /ab/ | /b/"), "items"),
    "ambiguous": (lark('start: s\ns: s s | s s s | "!" | "\\"" | ""'), None),
    "ambiguous words": (lark('start: s\ns: s s | s s s | /[!-~]+/ | /[!-~ ]/ | ""'), "items"),
    "a lexer of 2^200 states": (Grammar("regex", "(?s:.*)[a-m](?s:.){200}x"), "too many expressions"),
    "a product of lexers": (
        lark("start: A\nA: /.*a.{12}/ & /.*b.{13}/ & /.*c.{14}/"),
        "too many expressions",
    ),
    "what must not end so": (lark("start: A\nA: ~/.*!.{14}/"), None),
    "many gaps": (Grammar("regex", ".*".join("abcdefghijklmnop")), None),
    "one of 15,000": (Grammar("json_schema", json.dumps({"enum": list(range(10**9, 10**9 + 15_000))})), None),
    "one of 100,000": (Grammar("json_schema", json.dumps({"enum": list(range(100_000))})), "too big"),
    "3,000 terminals": (
        _chain("T", lambda inner: f'{inner} | "a"', 3000),
        "3001 terminals; 1000 is the most",
    ),
    "rules without end": (lark('start: "!" start "!" | start start'), "no text satisfies|items|None"),
    "nested schemas": (_nested(150), "nested more than 100 deep"),
    "a long chain of rules": (_chain("r", lambda inner: f'{inner} {inner} | "a"', 20_000), "levels deep"),
    "long chain of parts": (lark("start: " + " ".join(["[" * 50 + '"x"' + "]" * 50] * 300)), "levels deep"),
    "a chain of references": (_references(12_000, lambda inner: inner), "levels deep"),
    "references in arrays": (
        _references(5_000, lambda inner: {"type": "array", "items": inner}),
        "levels deep",
    ),
    "references in a rule": (
        lark("start: %json " + _references(9_000, lambda inner: inner).text),
        "levels deep",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_its_own_requests_trouble(
    demo: Tokenizer, grammars: VocabularyGrammars, name: str
) -> None:
    grammar, message = HOSTILE[name]
    engine = loop_of(demo, grammars)
    anything = SamplingParams(temperature=1.0, seed=1, max_tokens=60 if message else 25, grammar=grammar)
    engine.add(Request("hostile", [10], anything, demo.stop_ids))
    engine.add(Request("free", [1000], greedy(90)))
    engine.add(Request("held", [20], greedy(20, Grammar("regex", "[0-9]{3}-[0-9]{3}")), demo.stop_ids))
    events = run(engine)
    assert [event.token for event in events["free"]] == list(range(1001, 1091))
    held = demo.decode([event.token for event in events["held"] if event.token is not None])
    assert re.fullmatch("[0-9]{3}-[0-9]{3}", held)
    last = events["hostile"][-1]
    if message is None:
        assert last.finish_reason in ("stop", "length"), last.error
    else:
        assert last.finish_reason == "error"
        assert re.search(message, last.error or "")
        assert (last.error or "").startswith("the grammar: ")
        assert len(last.error or "") < 600


@pytest.mark.parametrize(
    "grammar",
    [
        _chain("r", lambda inner: f'{inner} | "a"', 3_500),
        _references(3_300, lambda inner: inner),
        _references(2_400, lambda inner: {"type": "array", "items": inner}),
        _references(1_950, lambda inner: {"anyOf": [inner, {"type": "integer"}]}),
    ],
    ids=["rules", "references", "arrays", "any of"],
)
def test_what_is_taken_fits_on_the_stack(grammars: VocabularyGrammars, grammar: Grammar) -> None:
    """Each of them ends the process in a thread with the usual 8 MB."""
    thread = GrammarThread()
    assert isinstance(thread.submit(lambda: grammars.compile(grammar)).result(PATIENCE_S), GrammarMask)
    thread.close()


def test_a_grammar_that_takes_a_core_for_too_long_in_all_ends(
    demo: Tokenizer, grammars: VocabularyGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask, "MAX_MASK_SECONDS", 0.0)
    engine = loop_of(demo, grammars)
    engine.add(Request("hostile", [10], greedy(9, Grammar("regex", "[0-9]{9}")), demo.stop_ids))
    engine.add(Request("free", [1000], greedy(9)))
    events = run(engine)
    assert [event.token for event in events["free"]] == list(range(1001, 1010))
    assert re.search("took more than 0 s of a core: make it simpler", events["hostile"][-1].error or "")
