"""A model's own metadata keys: the typed reads of weights/metadata.py, under the architecture's prefix.

    keys.integer("attention.head_count")       # llama.attention.head_count, from 1

Every absent, mistyped or absurd key is an error that names it. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.errors import MalformedFileError, UnsupportedError
from isthmus.weights.metadata import Metadata

# No model is near it; larger values are a corrupt file, and would overflow products of three.
MAX_COUNT = 1 << 24


@dataclass(frozen=True)
class Keys:
    metadata: Metadata

    @property
    def architecture(self) -> str:
        return self.metadata.str("general.architecture")

    def has(self, key: str) -> bool:
        return self.full(key) in self.metadata

    def integer(
        self, key: str, default: int | None = None, *, at_least: int = 1, at_most: int = MAX_COUNT
    ) -> int:
        """One integer for the whole model; an array over layers must hold one value only."""
        name = self.full(key)
        if isinstance(self.metadata.get(name), list):
            values = set(
                self.metadata.int_per_layer(name, self.integer("block_count"), min=at_least, max=at_most)
            )
            if len(values) != 1:
                raise UnsupportedError(
                    f"{self.metadata.path}: key {name!r} differs between layers; supported: one value"
                )
            return values.pop()
        if default is None:
            return self.metadata.int(name, min=at_least, max=at_most)
        return self.metadata.int(name, default, min=at_least, max=at_most)

    def number(self, key: str, default: float | None = None, *, at_least: float = 0.0) -> float:
        if default is None:
            return self.metadata.float(self.full(key), min=at_least)
        return self.metadata.float(self.full(key), default, min=at_least)

    def flag(self, key: str, default: bool) -> bool:
        return self.metadata.bool(self.full(key), default)

    def choice(self, key: str, options: Mapping[Any, Any], default: Any) -> Any:
        """What an enumeration's value stands for, among those this engine knows."""
        value = self.metadata.get(self.full(key), default)
        if isinstance(value, list) or value not in options:
            known = ", ".join(map(repr, options))
            raise UnsupportedError(
                f"{self.metadata.path}: key {self.full(key)!r} is {value!r}; supported: {known}"
            )
        return options[value]

    def vocab_size(self) -> int:
        """The length of the tokenizer's list, as llama.cpp has it; without a tokenizer ARCH.vocab_size."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, list) and tokens else self.integer("vocab_size")

    def bad(self, key: str, needed: str) -> MalformedFileError:
        """The error for a value that contradicts another: `raise keys.bad("block_count", "even")`."""
        return self.metadata.bad(self.full(key), needed)

    def full(self, key: str) -> str:
        return f"{self.architecture}.{key}"
