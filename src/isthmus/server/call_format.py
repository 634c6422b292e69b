"""How a dialect writes calls, as data: what a grammar that forces a call is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallFormat:
    """Texts around the parts of a call, and around and between the calls of one answer.

    list_begin, begin, name, middle, arguments, end, separator, begin, ..., list_end
    """

    begin: str
    middle: str
    end: str
    list_begin: str = ""
    separator: str = ""
    list_end: str = ""
    after_number: str | None = None  # a number stands between `middle` and this
    argument: tuple[str, str, str] | None = (
        None  # around key and value; None: the arguments are a JSON object
    )
    single: bool = False  # an answer has one call at most
