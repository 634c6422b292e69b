"""The helper process that renders chat templates: one JSON object a line in, one a line out.

A template is a program from a model file, so it runs here, in jinja2's immutable sandbox, under limits that
only a process of its own can have: RLIMIT_AS for memory, SIGALRM and the parent's kill for time, a count for
output. Started by path, it imports the standard library and jinja2 and nothing of Isthmus, which keeps its
start under 0.3 s.

    in   {"source": str, "variables": {...}, "barrier": {character: replacement}}
    out  {"text": str} or {"error": {"kind": "syntax" | "raised" | "limit" | "runtime", "message": str}}
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Methods and filters whose text arguments are looked for in the value, and are not output. Of `replace` the
# first argument alone is; the second becomes text of the template.
_MATCHING_METHODS = {
    "count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
    "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip",
}  # fmt: skip
_MATCHING_FILTERS = {"reject", "rejectattr", "replace", "select", "selectattr", "trim"}


class OutputLimitError(Exception):
    pass


class RaisedError(jinja2.TemplateError):
    """The template called raise_exception: its own message to the user."""


class Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """jinja2 as Hugging Face's apply_chat_template sets it up, without `lipsum`."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    del env.globals["lipsum"]
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise RaisedError(message)


@lru_cache(maxsize=8)
def compile_template(source: str, barrier: tuple[tuple[str, str], ...]) -> tuple[jinja2.Template, bool]:
    """The template, its matched constants behind the barrier, and whether it loops over message content."""
    env = environment()
    tree = env.parse(source)
    replacements = dict(barrier)
    for constant in _matched_constants(tree):
        constant.value = constant.value.translate(str.maketrans(replacements))
    return env.from_string(tree), _loops_over_content(tree)


def _matched_constants(tree: nodes.Template) -> Iterator[nodes.Const]:
    """Strings that are compared with message text, such as '</think>' in `content.split('</think>')`."""
    places: list[nodes.Node] = [
        node
        for node in tree.find_all(nodes.Compare)
        if not any(map(_names_a_token, node.find_all(nodes.Name)))
    ]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _MATCHING_METHODS:
            places += call.args[:1] if call.node.attr == "replace" else call.args
    for node in tree.find_all(nodes.Filter):
        if node.name in _MATCHING_FILTERS:
            places += node.args[:1] if node.name == "replace" else node.args
    for place in places:
        found = [place] if isinstance(place, nodes.Const) else place.find_all(nodes.Const)
        yield from (constant for constant in found if isinstance(constant.value, str))


def _names_a_token(name: nodes.Name) -> bool:
    return name.name.endswith("_token")  # bos_token and the like are text of the template, not of a message


def _loops_over_content(tree: nodes.Template) -> bool:
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Name):
        return node.name == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )


def render(request: Mapping[str, Any], output_chars: int) -> str:
    """Raises OutputLimitError and whatever the template raises."""
    template, loops = compile_template(request["source"], tuple(request["barrier"].items()))
    variables = request["variables"]
    if not loops:
        for message in variables["messages"]:
            if isinstance(message.get("content"), list):
                message["content"] = "\n".join(part["text"] for part in message["content"])
    pieces, count = [], 0
    for piece in template.generate(variables):
        count += len(piece)
        if count > output_chars:
            raise OutputLimitError(f"more than {output_chars} characters of output")
        pieces.append(piece)
    return "".join(pieces)


def answer(request: Mapping[str, Any], output_chars: int) -> dict[str, Any]:
    """The reply to one request; a template can raise anything, so everything is caught."""
    try:
        return {"text": render(request, output_chars)}
    except RaisedError as error:
        return _error("raised", str(error.message))
    except jinja2.TemplateSyntaxError as error:
        return _error("syntax", f"line {error.lineno}: {error.message}")
    except OutputLimitError as error:
        return _error("limit", str(error))
    except MemoryError:
        return _error("limit", "more memory than a template may use")
    except RecursionError:
        return _error("limit", "macros or values nested too deeply")
    except OverflowError as error:
        return _error("limit", str(error))
    except Exception as error:
        return _error("runtime", f"{type(error).__name__}: {error}"[:2000])


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}


def _send(stream: BinaryIO, reply: Mapping[str, Any]) -> None:
    stream.write(json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    stream.flush()


def main(seconds: float, memory_bytes: int, output_chars: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _send(sys.stdout.buffer, {"ready": True})
    for line in sys.stdin.buffer:
        # Should the parent die it cannot kill us: the alarm, unhandled on purpose, ends a template that never
        # ends.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        _send(sys.stdout.buffer, answer(json.loads(line.decode("utf-8", "surrogatepass")), output_chars))
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
