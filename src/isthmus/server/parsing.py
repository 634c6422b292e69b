"""Which parser reads the answer to a chat."""

from __future__ import annotations

from isthmus.server.events import Parser, PlainParser
from isthmus.server.schemas.chat import ChatRequest


def parser_for(chat: ChatRequest) -> Parser:
    """A fresh one: a parser remembers its answer so far. All choices of a request get their own."""
    return PlainParser()
