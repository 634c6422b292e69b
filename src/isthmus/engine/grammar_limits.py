"""What a grammar may be at most, found in its text before llguidance sees it. No torch.

llguidance bounds its own tables and steps; it follows rules and references by recursion, which nothing
bounds: a chain of 3,000 lark rules or of 2,000 `$ref` overflowed a stack of 8 MB and ended the process, and
one of 3,000 terminals took 31 s to be refused. So levels are counted here, as many as the text can have
however they hang together, and grammars are compiled in threads whose stacks hold them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from isthmus.errors import UsageError

T = TypeVar("T")

MAX_LEVELS = 10_000
MAX_TERMINALS = 1_000
MAX_SCHEMA_DEPTH = 100
# A level took 3 to 6 KB. Memory that is not touched is not taken.
_STACK_BYTES = 256 << 20

# A lexer of a{20000} took 0.2 s for its first mask, of a{1000000} 2 s.
MAX_REPETITIONS = 20_000

# llguidance reads this key of a schema as options of its own, `lenient` among them: not a caller's to set.
OPTIONS_KEY = "x-guidance"

_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_JSON = re.compile(r"%json\s*")
_TERMINAL = re.compile(r"\b[A-Z_]\w*(?:\[[^\]\n]*\])?\s*:")


class GrammarThread:
    """A thread that compiles, started when first needed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        before = threading.stack_size(_STACK_BYTES)
        try:
            return self._thread.submit(work)
        finally:
            threading.stack_size(before)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def check_lark(text: str) -> None:
    """UsageError for a lark grammar with too many levels, terminals or repetitions, or a bad schema in it."""
    rules = []
    end = 0
    for found in _JSON.finditer(text):
        if found.start() < end:  # inside a schema
            continue
        rules.append(text[end : found.start()])
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise UsageError(f"%json is followed by no JSON: {error}") from None
        check_schema(schema, options=True)
    rest = "".join([*rules, text[end:]])
    check_repetitions(rest)
    # Every rule has a colon, and every rule that llguidance makes of a part of one a bracket or a sign.
    _check_levels(sum(map(rest.count, ":([{~")))
    num_terminals = len(_TERMINAL.findall(rest))
    if num_terminals > MAX_TERMINALS:
        raise UsageError(f"it has {num_terminals} terminals; {MAX_TERMINALS} is the most")


def check_schema(schema: Any, *, options: bool = False) -> None:
    """UsageError for a JSON schema that is too deep, also by its references, or has bad patterns in it.

    options: those of llguidance are ours and stand at the top.
    """
    if options and isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if key != OPTIONS_KEY}
    depth, num_references = _measured(schema, 0)
    _check_levels(depth * (num_references + 1))


def check_repetitions(pattern: str) -> None:
    count = repetitions(pattern)
    if count > MAX_REPETITIONS:
        raise UsageError(f"a pattern repeats something {count} times; {MAX_REPETITIONS} is the most")


def repetitions(pattern: str) -> int:
    """How often nested counts of a regex repeat something at most: 1200 for (a{30}b){40}."""
    groups = [1]
    last = 1  # of the item that just ended
    at = 0
    while at < len(pattern):
        character = pattern[at]
        count = _COUNT.match(pattern, at)
        if count is not None:
            last *= max(int(count[1][:9]), int((count[2] or "0")[:9]))
            groups[-1] = max(groups[-1], last)
            at = count.end()
            continue
        if character == "(":
            groups.append(1)
        elif character == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif character not in "?*+":
            last = 1
        at += 2 if character == "\\" else 1
    return max(groups)


def _check_levels(count: int) -> None:
    if count > MAX_LEVELS:
        raise UsageError(
            f"its rules and references may be {count} levels deep; {MAX_LEVELS} is the most: make it smaller"
        )


def _measured(schema: Any, depth: int) -> tuple[int, int]:
    """(levels, references) of a schema, without what its references lead to."""
    if depth > MAX_SCHEMA_DEPTH:
        raise UsageError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
    num_references = 0
    if isinstance(schema, dict):
        if OPTIONS_KEY in schema:
            raise UsageError(f"{OPTIONS_KEY!r} is no keyword of JSON Schema")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            check_repetitions(pattern)
        num_references += isinstance(schema.get("$ref"), str)
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    deepest = depth
    for value in inner:
        levels, references = _measured(value, depth + 1)
        deepest, num_references = max(deepest, levels), num_references + references
    return deepest, num_references
