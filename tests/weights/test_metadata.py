"""Typed reads: the value, the default, or an error that names key and file."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import MalformedFileError
from isthmus.weights.metadata import Metadata

FILE = Path("dir/model.gguf")


def of(**values: Any) -> Metadata:
    return Metadata(values, FILE)


def test_reads_like_a_mapping() -> None:
    metadata = of(a=1, b="x")
    assert dict(metadata) == {"a": 1, "b": "x"}
    assert "a" in metadata
    assert metadata.get("c") is None


def test_typed_reads_give_the_value() -> None:
    metadata = of(i=3, f=0.5, s="x", b=False, tokens=["a", "b"])
    assert metadata.int("i", min=1, max=3) == 3
    assert metadata.float("f") == 0.5
    assert metadata.float("i") == 3.0  # some writers store a round base frequency as an integer
    assert metadata.str("s") == "x"
    assert metadata.bool("b") is False
    assert metadata.array("tokens", str, length=2) == ["a", "b"]


def test_a_default_is_for_absence_only() -> None:
    metadata = of(i=0)
    assert metadata.int("i", 7) == 0
    assert metadata.int("j", 7) == 7
    assert metadata.float("j", None) is None
    assert metadata.str("j", "") == ""
    assert metadata.bool("j", True) is True
    assert metadata.array("j", int, None) is None
    with pytest.raises(MalformedFileError):
        of(i="text").int("i", 7)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda m: m.int("text"), "key 'text' must be an integer, got 'abc'"),
        (lambda m: m.int("yes"), "key 'yes' must be an integer, got True"),
        (lambda m: m.int("half"), "key 'half' must be an integer, got 0.5"),
        (lambda m: m.int("eight", min=9), "key 'eight' must be an integer of at least 9, got 8"),
        (lambda m: m.int("eight", max=7), "key 'eight' must be an integer of at most 7, got 8"),
        (lambda m: m.int("eight", min=0, max=7), "key 'eight' must be an integer from 0 to 7, got 8"),
        (lambda m: m.float("text"), "key 'text' must be a finite number, got 'abc'"),
        (lambda m: m.float("yes"), "key 'yes' must be a finite number, got True"),
        (lambda m: m.float("nan"), "key 'nan' must be a finite number, got nan"),
        (lambda m: m.float("inf", min=0.0), "key 'inf' must be a finite number of at least 0.0, got inf"),
        (lambda m: m.float("half", min=1.0), "key 'half' must be a finite number of at least 1.0, got 0.5"),
        (lambda m: m.str("eight"), "key 'eight' must be a string, got 8"),
        (lambda m: m.bool("eight"), "key 'eight' must be true or false, got 8"),
        (lambda m: m.array("eight", int), "key 'eight' must be an array of int, got 8"),
        (lambda m: m.array("mixed", int), "key 'mixed' must be an array of int, got [1, True]"),
        (
            lambda m: m.array("list", int, length=3),
            "key 'list' must be an array of 3 elements, got 2 elements",
        ),
        (lambda m: m.int("gone"), "key 'gone' is missing"),
        (lambda m: m.str("gone"), "key 'gone' is missing"),
        (lambda m: m.int_per_layer("gone", 2), "key 'gone' is missing"),
        (lambda m: m.int_per_layer("list", 3), "one integer, or one for each of 3 layers, got 2 elements"),
        (lambda m: m.int_per_layer("mixed", 2), "key 'mixed' must be an integer, got True"),
        (lambda m: m.int_per_layer("list", 2, min=2), "key 'list' must be an integer of at least 2, got 1"),
    ],
)
def test_a_bad_value_is_named_with_its_file(read: Any, message: str) -> None:
    metadata = of(
        text="abc", yes=True, half=0.5, eight=8, nan=math.nan, inf=math.inf, mixed=[1, True], list=[1, 2]
    )
    with pytest.raises(MalformedFileError, match=re.escape(message)) as caught:
        read(metadata)
    assert str(caught.value).startswith(f"{FILE}: key '")


def test_one_number_stands_for_all_layers() -> None:
    metadata = of(one=4, each=[4, 8, 4])
    assert metadata.int_per_layer("one", 3) == [4, 4, 4]
    assert metadata.int_per_layer("each", 3) == [4, 8, 4]
    assert metadata.int_per_layer("none", 2, 6) == [6, 6]


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(MalformedFileError) as caught:
        of(a="x" * 10_000).int("a")
    assert len(str(caught.value)) < 150
