"""Grammars compiled by llguidance over a model's vocabulary: what an answer must be, as a matcher of tokens.

Both processes compile: the server to refuse a bad grammar before the engine hears of it, the engine to use
it. Whatever llguidance does not fully support is an error, never ignored. No torch.

Special tokens are no text here: a grammar names one as `<[id]>`, and a string cannot contain it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from isthmus.engine.grammar_limits import OPTIONS_KEY, check_lark, check_repetitions, check_schema
from isthmus.engine.request import Grammar
from isthmus.errors import UsageError
from isthmus.tokenizer import Tokenizer

# Between tokens of JSON: one blank, or one line end with an indent. A small model left alone with free white
# space may write nothing else; pretty-printed JSON fits.
WHITESPACE = r"[ ]|\n[ \t]{0,40}"

# Where llguidance stops. A step of 50,000 items, its default, is a mask of 0.2 to 0.4 s for an ambiguous
# grammar over 49,000 tokens; an object of 1,000 optional keys needs more than 5,000.
_LIMITS = LLParserLimits(
    max_grammar_size=200_000, max_lexer_states=100_000, step_max_items=20_000, verbose_errors=False
)

# Clients send the same tools and schemas with each turn, and n choices share one.
_NUM_KEPT = 32


class GrammarCompiler:
    """Grammars over one vocabulary. Thread-safe; what is slow runs without the interpreter's lock."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes half a second for 150,000 tokens. UsageError for a vocabulary without an end token."""
        if not tokenizer.stop_ids:
            raise UsageError(
                "this model's vocabulary has no token that ends an answer, which a grammar needs"
            )
        self._tokenizer = LLTokenizer(
            _Vocabulary(tokenizer),  # type: ignore[arg-type]  # what it needs, without its base class
            tokenizer.vocab_size,
            sorted(tokenizer.stop_ids),
        )
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of an answer. UsageError says what is bad, unsupported or too large."""
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                return kept.deep_copy()
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        _check(matcher)
        matcher.compute_bitmask()  # a lexer that explodes does it here
        _check(matcher)
        if matcher.is_stopped() and not matcher.is_accepting():
            raise UsageError("no text satisfies it")
        with self._lock:
            self._kept[grammar] = matcher
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
            return matcher.deep_copy()


def json_rule(schema: Any, *, lenient: bool = False) -> str:
    """A JSON value that satisfies `schema`, as the right side of a lark rule. UsageError: cannot be meant.

    lenient: keywords and formats that llguidance lacks count as not said, where they would else be errors.
    """
    if isinstance(schema, dict):
        check_schema(schema)
        options = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE, "lenient": lenient}
        schema = {**schema, OPTIONS_KEY: options}
    elif schema is not True:
        raise UsageError(f"a JSON schema is an object, got {json.dumps(schema)[:100]}")
    else:
        schema = {OPTIONS_KEY: {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(schema)}"


def _source(grammar: Grammar) -> str:
    """In llguidance's own form."""
    if grammar.kind == "regex":
        check_repetitions(grammar.text)
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        check_lark(grammar.text)
        return LLMatcher.grammar_from_lark(grammar.text)
    schema: Any = {"type": "object"}
    if grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the schema is no JSON: {error}") from None
    return LLMatcher.grammar_from_lark(f"start: {json_rule(schema)}")


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise UsageError(error_of(matcher))


def error_of(matcher: LLMatcher) -> str:
    """What went wrong, without the state of the parser that llguidance tells too."""
    message = matcher.get_error().split("<", 1)[0].replace("panic: assertion failed:", "too large:")
    return " ".join(message.split())[:500] or "llguidance refuses it"


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        markers = tokenizer.special_literals
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.stop_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in ids]
        self.special_token_ids = [
            token for token in ids if tokenizer.is_special(token) or tokenizer.token_text(token) in markers
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens that the model would write for `text` inside an answer."""
        return self._tokenizer.encode_inside(text if isinstance(text, str) else text.decode())
