"""Thoughts before an answer as rules of a grammar: free text, and then their end."""

from __future__ import annotations

from isthmus.server import reasoning
from isthmus.server.lark import Lark
from isthmus.server.tools.harmony import CALL, CHANNEL, END, MESSAGE, RETURN, START

_AROUND = r"[ \n]{0,4}"


def thoughts(lark: Lark, dialect: str | None, *, inside: bool) -> str:
    """What may or must come first; "" for a model that does not think. `inside`: the prompt has begun it."""
    if dialect is None:
        return ""
    if dialect == "harmony":
        rest = f"{lark.until(END, without=(RETURN, CALL))} {lark.text(START + 'assistant')}"
        message = lark.rule(f"{lark.text(CHANNEL + 'analysis' + MESSAGE)} {rest}")
        return f"{rest} {message}*" if inside else f"{message}*"
    begin, end = reasoning.PARSERS[dialect].markers[:2]
    rest = f"{lark.until(end)} {lark.pattern(_AROUND)}"
    return rest if inside else lark.rule(f"{lark.text(begin)} {rest}") + "?"


def final(lark: Lark, dialect: str | None) -> str:
    """What stands between the thoughts and the answer's text."""
    return lark.text(CHANNEL + "final" + MESSAGE) if dialect == "harmony" else ""
