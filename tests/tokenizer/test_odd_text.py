"""Text that no one writes and everyone is sent: surrogates, NUL, megabytes of one letter."""

import pytest

from isthmus.errors import UsageError
from isthmus.tokenizer import Tokenizer


def test_lone_surrogates_become_the_replacement_character(smollm: Tokenizer) -> None:
    ids = smollm.encode("a\ud83db\udc00", add_special=False, parse_special=False)
    assert smollm.decode(ids) == "a\ufffdb\ufffd"


def test_halves_of_a_pair_become_their_character(smollm: Tokenizer) -> None:
    # Two JSON escapes of one emoji can arrive as two surrogates.
    ids = smollm.encode("\ud83d\ude00", add_special=False, parse_special=False)
    assert smollm.decode(ids) == "\U0001f600"


def test_nul_is_text(smollm: Tokenizer) -> None:
    ids = smollm.encode("a\x00b", add_special=False, parse_special=False)
    assert smollm.decode(ids) == "a\x00b"


@pytest.mark.parametrize("text", [b"bytes", None, 5, ["a"]])
def test_other_types_are_refused(text: object, smollm: Tokenizer) -> None:
    with pytest.raises(UsageError, match=f"must be a str, got {type(text).__name__}"):
        smollm.encode(text, add_special=False, parse_special=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["a", " ", "\n", "e\u0301", "9", "<", "中"])
def test_a_long_run_of_one_letter_is_encoded_like_a_short_one(unit: str, smollm: Tokenizer) -> None:
    """Work in proportion to the square of the length would take hours here."""
    text = unit * 300_000
    ids = smollm.encode(text, add_special=False, parse_special=True)
    assert smollm.decode(ids) == text
    assert len(set(ids[10:-10])) <= 2 + len(unit.encode())  # the same few tokens again and again
