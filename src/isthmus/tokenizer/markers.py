"""What token texts tell where the metadata is silent: which are markers, and which end an answer.

GGUF says `user defined` both of plain text that was added to a vocabulary (runs of spaces, `<h1>`) and of
structure the model was trained to write (`<think>`, `<tool_call>`). User text must not become the second
kind.
"""

from __future__ import annotations

import re

# Control tokens of these texts end an answer even where the file names another eos or eot (llama.cpp's list).
END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<eos>",
        "</s>",
        "<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
    }
)

# Where all of these exist, `<|end|>` closes a message of an answer that goes on (the harmony format).
HARMONY = frozenset({"<|return|>", "<|call|>", "<|channel|>"})

_BRACKETED = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|<\|.*\|>", re.DOTALL)
_HTML = re.compile(
    r"</?(?:a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|table|tbody|td"
    r"|tfoot|th|thead|tr|u|ul)>"
)


def is_marker(text: str) -> bool:
    """True for one bracketed word, such as `<think>` or `[TOOL_CALLS]`, that is no HTML element."""
    return bool(_BRACKETED.fullmatch(text)) and not _HTML.fullmatch(text)


def looks_like_control(text: str) -> bool:
    """For files without token types: `<|...|>` and the known ends of a turn."""
    return text in END_OF_TURN or (text.startswith(("<|", "<\uff5c")) and text.endswith(("|>", "\uff5c>")))
