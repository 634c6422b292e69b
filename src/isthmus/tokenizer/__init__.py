"""Text to token ids and back: vocabularies from GGUF metadata, incremental decoding, chat templates.

Knows nothing about weights, engines or HTTP, and imports no torch. Names are imported on first use, so that
the template helper process starts with jinja2 alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.tokenizer.chat_template import ChatTemplate
    from isthmus.tokenizer.detokenize import Detokenizer
    from isthmus.tokenizer.segment import Segment
    from isthmus.tokenizer.tokenizer import Tokenizer
    from isthmus.tokenizer.vocabulary import TokenizerWarning

_PUBLIC = {
    "ChatTemplate": "isthmus.tokenizer.chat_template",
    "Detokenizer": "isthmus.tokenizer.detokenize",
    "Segment": "isthmus.tokenizer.segment",
    "Tokenizer": "isthmus.tokenizer.tokenizer",
    "TokenizerWarning": "isthmus.tokenizer.vocabulary",
}

__all__ = ["ChatTemplate", "Detokenizer", "Segment", "Tokenizer", "TokenizerWarning"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'isthmus.tokenizer' has no attribute {name!r}")
