"""Thoughts in the text of an answer, one file for each dialect. A new one is its file and a line here."""

from __future__ import annotations

from isthmus.server.reasoning.harmony import HarmonyReasoningParser
from isthmus.server.reasoning.think import MistralThinkParser, ThinkParser

__all__ = ["PARSERS", "ReasoningParser", "detect"]

ReasoningParser = ThinkParser | HarmonyReasoningParser

PARSERS: dict[str, type[ReasoningParser]] = {
    "think": ThinkParser,
    "mistral": MistralThinkParser,
    "harmony": HarmonyReasoningParser,
}

# As in `tools`. A template that only cuts thoughts out of earlier answers has the closing tag alone.
FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("think", ("</think>",)),
)


def detect(template: str) -> str | None:
    """The parser for what a chat template's model writes; None where it shows no thoughts."""
    return next((name for name, texts in FAMILIES if all(text in template for text in texts)), None)
