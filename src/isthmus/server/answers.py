"""How the answer to a chat is read, and what it is held to: a dialect, what was asked for, and a grammar.

    thoughts, if the model has them, free
    then: a call | the format | text with a call in it, as tools, tool_choice and response_format say

A grammar is made only where something must be held; it covers the whole answer, thoughts included, so that
they end before what is held begins.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from isthmus.engine.grammar_limits import GrammarThread
from isthmus.engine.request import Grammar
from isthmus.errors import UsageError
from isthmus.server import tools
from isthmus.server.call_grammar import Called, CallGrammar
from isthmus.server.dialect import Dialect
from isthmus.server.errors import ApiError
from isthmus.server.events import Parser
from isthmus.server.lark import Lark
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.schemas.tools import Tool
from isthmus.server.thought_grammar import final, thoughts

if TYPE_CHECKING:
    from isthmus.engine.grammar import GrammarCompiler
    from isthmus.tokenizer import Tokenizer

# The worst that llguidance's own limits let through took 6 s; then others wait for the thread no longer.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Answering:
    """One request's. `shown`: special tokens that the parser reads."""

    dialect: Dialect
    functions: tools.Functions | None = None
    inside: bool = False
    grammar: Grammar | None = None

    @property
    def shown(self) -> frozenset[str]:
        return self.dialect.markers(with_tools=self.functions is not None)

    def parser(self) -> Parser:
        return self.dialect.parser(self.functions, inside=self.inside)


PLAIN = Answering(Dialect())


class Answers:
    """Those of one model. Grammars are made in a thread of their own, and for a bounded time."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self.dialect = dialect
        self._tokenizer = tokenizer
        self._compiler: GrammarCompiler | None = None  # made when first needed
        self._thread = GrammarThread()
        self._until = math.inf  # the thread's own: when the request it works for gives up

    def close(self) -> None:
        self._thread.close()

    async def of(self, chat: ChatRequest, *, inside: bool) -> Answering:
        """inside: the prompt has opened a block of thoughts that the answer goes on with.

        ApiError 400 for a schema or grammar that cannot be held, with its `param`.
        """
        functions = {tool.function.name: tool.function.schema_of_arguments for tool in chat.callable_tools}
        answering = Answering(self.dialect, functions or None, inside)
        param = chat.held
        if param is None:
            return answering
        work = partial(self._grammar, chat, param, answering.inside, time.monotonic() + _PATIENCE_S)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                grammar = await asyncio.wrap_future(self._thread.submit(work))
        except TimeoutError:
            message = f"{param}: what it asks for could not be compiled in {_PATIENCE_S:g} s"
            raise ApiError(400, message, param=param, code="invalid_value") from None
        return replace(answering, grammar=grammar)

    def check(self, grammar: Grammar) -> None:
        """UsageError unless the engine will take it too, and for one whose request waits no longer."""
        from isthmus.engine.grammar import GrammarCompiler

        if time.monotonic() > self._until:
            raise UsageError("it took too long to compile")
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer)
        self._compiler.compile(grammar)

    def _grammar(self, chat: ChatRequest, param: str, inside: bool, until: float) -> Grammar:
        """until: when nobody waits for it any more, by time.monotonic(); of many tools the rest is left."""
        self._until = until
        lark = self._lark()
        try:
            before = thoughts(lark, self.dialect.reasoning, inside=inside)
            grammar = Grammar("lark", lark.source(f"{before} {lark.rule(self._answer(chat, lark))}"))
            self.check(grammar)
        except UsageError as error:
            raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from None
        return grammar

    def _lark(self) -> Lark:
        return Lark(self._tokenizer.special_id, self.dialect.markers(with_tools=True))

    def _answer(self, chat: ChatRequest, lark: Lark) -> str:
        """What follows the thoughts, as the right side of a rule."""
        schema = chat.response_format.schema_of_answer if chat.response_format else None
        before = final(lark, self.dialect.reasoning)
        if chat.forced_tools:
            return self._calls(chat, lark, chat.forced_tools)
        if chat.grammar is not None:
            self.check(Grammar(chat.grammar.syntax, chat.grammar.definition))  # alone: its lines have numbers
            return f"{before} {lark.own(chat.grammar.syntax, chat.grammar.definition)}"
        if schema is not None:
            text = f"{before} {lark.json(schema)}"
            called = chat.callable_tools
            return f"{text} | {self._calls(chat, lark, called)}" if called else text
        if self.dialect.reasoning == "harmony":
            text = lark.free(without=self._parser.markers)
            return f"{before} {text} | {self._calls(chat, lark, chat.callable_tools)}"
        return self._text_or_calls(chat, lark)

    def _calls(self, chat: ChatRequest, lark: Lark, called: Sequence[Tool], *, begun: bool = False) -> str:
        form = self._parser.format_for(self._tokenizer.special_id)
        several = chat.parallel_tool_calls is not False and chat.tool_choice in (None, "auto", "required")
        functions = [self._called(chat, tool) for tool in called]
        begin = self._parser.begins[0] if begun else ""
        return CallGrammar(lark, form).calls(functions, several=several, begun=begin)

    def _text_or_calls(self, chat: ChatRequest, lark: Lark) -> str:
        """Any text, in which what begins like a call is one."""
        begins, called = self._parser.begins, chat.callable_tools
        if not begins:  # a call is the whole answer and begins with a brace
            return f"{lark.pattern(r'[^{](?s:.*)')}? | {self._calls(chat, lark, called)}"
        before = lark.until(begins[0], without=begins[1:])
        return f"{lark.free(without=begins)} | {before} {self._calls(chat, lark, called, begun=True)}"

    def _called(self, chat: ChatRequest, tool: Tool) -> Called:
        """What a call is held to: the schema, without `strict` as much of it as can be."""
        name, schema = tool.function.name, tool.function.schema_of_arguments
        form = self._parser.format_for(self._tokenizer.special_id)
        for called in (Called(name, schema), Called(name, schema, lenient=True)):
            lark = self._lark()
            try:
                call = CallGrammar(lark, form).calls([called], several=False)
                self.check(Grammar("lark", lark.source(call)))
            except UsageError as error:
                if tool.function.strict:
                    param = f"tools[{chat.callable_tools.index(tool)}].function.parameters"
                    raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from None
            else:
                return called
        # Not even so (a pattern that is none, a reference to nothing): names of arguments, in an XML dialect.
        properties = schema.get("properties")
        names = properties if isinstance(properties, Mapping) and form.argument else {}
        anything: dict[str, Any] = {"properties": {each: {} for each in names}} if names else {}
        return Called(name, {"type": "object"} | anything)

    @property
    def _parser(self) -> type[tools.ToolParser]:
        if self.dialect.tools is None:
            raise UsageError("this server has no parser of tool calls for its model (--tool-parser)")
        return tools.PARSERS[self.dialect.tools]
