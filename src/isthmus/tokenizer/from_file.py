"""The text side of a model file: only its header is read."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from isthmus.tokenizer.chat_template import ChatTemplate
from isthmus.tokenizer.template_process import Limits
from isthmus.tokenizer.tokenizer import Tokenizer
from isthmus.weights.source import open_weights


def open_texts(path: Path, *, limits: Limits | None = None) -> tuple[Tokenizer, ChatTemplate]:
    """IsthmusError for a file that is none, or whose vocabulary cannot be used."""
    with closing(open_weights(path)) as source:
        tokenizer = Tokenizer.from_gguf(source.metadata)
    return tokenizer, ChatTemplate.for_tokenizer(tokenizer, limits=limits)
