"""A piece of prompt text that remembers who wrote it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """`special` text comes from the template and is parsed for special tokens; other text never is."""

    text: str
    special: bool
