"""Typed reads of a model's key-value metadata.

A `Metadata` is a read-only mapping (strings, ints, floats, bools, lists of them) that also knows its file, so
that a model's config can say `m.int("llama.block_count", min=1)` and a bad value becomes an error naming key
and file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, overload

from isthmus.errors import MalformedFileError

# Inside the class `int`, `str` .. are methods; annotations use these names.
Int = int
Float = float
Str = str
Bool = bool
T = TypeVar("T")


class _Required:
    """The default that means: the key must be there."""


REQUIRED: Final = _Required()
_SHOWN = 60  # characters of a bad value that an error quotes


class Metadata(Mapping[Str, Any]):
    """`values`: key -> value as decoded by a reader; `path`: the file, for messages.

    Every typed read raises MalformedFileError when the key is absent and no default is given, or when the
    value has another type or lies outside the bounds. A default is returned as it is.
    """

    def __init__(self, values: Mapping[Str, Any], path: Path) -> None:
        self._values = dict(values)
        self.path = path

    def __getitem__(self, key: Str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[Str]:
        return iter(self._values)

    def __len__(self) -> Int:
        return len(self._values)

    @overload
    def int(self, key: Str, *, min: Int | None = ..., max: Int | None = ...) -> Int: ...
    @overload
    def int(self, key: Str, default: T, *, min: Int | None = ..., max: Int | None = ...) -> Int | T: ...
    def int(
        self, key: Str, default: Any = REQUIRED, *, min: Int | None = None, max: Int | None = None
    ) -> Any:
        """An integer (not a bool, not a float) with min <= value <= max."""
        if key not in self._values:
            return self._absent(key, default)
        return self._int(key, self._values[key], min, max)

    @overload
    def float(self, key: Str, *, min: Float | None = ..., max: Float | None = ...) -> Float: ...
    @overload
    def float(
        self, key: Str, default: T, *, min: Float | None = ..., max: Float | None = ...
    ) -> Float | T: ...
    def float(
        self, key: Str, default: Any = REQUIRED, *, min: Float | None = None, max: Float | None = None
    ) -> Any:
        """A finite number, integers included, with min <= value <= max."""
        if key not in self._values:
            return self._absent(key, default)
        value = self._values[key]
        number = isinstance(value, (Int, Float)) and not isinstance(value, Bool)
        if not number or not math.isfinite(value) or _outside(value, min, max):
            raise self.bad(key, "a finite number" + _bounds(min, max))
        return Float(value)

    @overload
    def str(self, key: Str) -> Str: ...
    @overload
    def str(self, key: Str, default: T) -> Str | T: ...
    def str(self, key: Str, default: Any = REQUIRED) -> Any:
        """A string, possibly empty."""
        if key not in self._values:
            return self._absent(key, default)
        if not isinstance(self._values[key], Str):
            raise self.bad(key, "a string")
        return self._values[key]

    @overload
    def bool(self, key: Str) -> Bool: ...
    @overload
    def bool(self, key: Str, default: T) -> Bool | T: ...
    def bool(self, key: Str, default: Any = REQUIRED) -> Any:
        """True or false."""
        if key not in self._values:
            return self._absent(key, default)
        if not isinstance(self._values[key], Bool):
            raise self.bad(key, "true or false")
        return self._values[key]

    @overload
    def array(self, key: Str, kind: type[T], *, length: Int | None = ...) -> list[T]: ...
    @overload
    def array(
        self, key: Str, kind: type[T], default: list[T] | None, *, length: Int | None = ...
    ) -> list[T] | None: ...
    def array(self, key: Str, kind: type[Any], default: Any = REQUIRED, *, length: Int | None = None) -> Any:
        """A list of elements of type `kind` (int, float, str, bool); exactly `length` of them if given."""
        if key not in self._values:
            return self._absent(key, default)
        value = self._values[key]
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self.bad(key, f"an array of {kind.__name__}")
        if length is not None and len(value) != length:
            raise self.bad(key, f"an array of {length} elements", f"{len(value)} elements")
        return value

    def int_per_layer(
        self,
        key: Str,
        layers: Int,
        default: Int | None = None,
        *,
        min: Int | None = None,
        max: Int | None = None,
    ) -> list[Int]:
        """One integer a layer: GGUF stores a single number where all layers agree, else an array."""
        value = self._values.get(key, default)
        if value is None:
            self._absent(key, REQUIRED)
        if not isinstance(value, list):
            return [self._int(key, value, min, max)] * layers
        if len(value) != layers:
            raise self.bad(key, f"one integer, or one for each of {layers} layers", f"{len(value)} elements")
        return [self._int(key, item, min, max) for item in value]

    def bad(self, key: Str, needed: Str, came: Str | None = None) -> MalformedFileError:
        """The error for a value no model can mean: `raise metadata.bad(key, "at most expert_count = 8")`."""
        if came is None:
            came = repr(self._values.get(key))
        if len(came) > _SHOWN:
            came = came[:_SHOWN] + "..."
        return MalformedFileError(f"{self.path}: key '{key}' must be {needed}, got {came}")

    def _int(self, key: Str, value: Any, low: Int | None, high: Int | None) -> Int:
        if type(value) is not Int or _outside(value, low, high):
            raise self.bad(key, "an integer" + _bounds(low, high), repr(value))
        return value

    def _absent(self, key: Str, default: Any) -> Any:
        if default is REQUIRED:
            raise MalformedFileError(
                f"{self.path}: key '{key}' is missing, and the model cannot be built without it"
            )
        return default


def _outside(value: Float, low: Float | None, high: Float | None) -> Bool:
    return (low is not None and value < low) or (high is not None and value > high)


def _bounds(low: Float | None, high: Float | None) -> Str:
    """The bounds in words, for a message: " of at least 1", " from 1 to 8", or nothing."""
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return f" of at most {high}" if high is not None else ""
