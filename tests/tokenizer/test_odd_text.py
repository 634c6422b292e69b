"""Text that no one writes and everyone is sent: surrogates, NUL, megabytes of one letter."""

import threading
import time

import pytest

from isthmus.config import LONG_TEXT_CHARACTERS
from isthmus.errors import ContextLengthError, UsageError
from isthmus.tokenizer import Segment, Tokenizer

_LONG = "The quick brown fox, number 12345. " * (LONG_TEXT_CHARACTERS // 20)


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


@pytest.mark.parametrize("text", [_LONG[: LONG_TEXT_CHARACTERS - 1], _LONG], ids=["short", "long"])
def test_others_have_the_interpreter_while_a_text_is_encoded(text: str, smollm: Tokenizer) -> None:
    """An event loop in another thread passes tokens on meanwhile."""
    begun, ended = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        smollm.encode(text, add_special=False, parse_special=False)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    turns = 0
    while not ended.is_set():
        turns += 1
        time.sleep(0.001)
    thread.join()
    assert turns > 5  # one or two, if the lock is held for the 50 ms or more that encoding takes


@pytest.mark.parametrize("most", [0, 1, 4, 5, 6, 100])
def test_more_tokens_than_wanted_are_counted_and_not_made(most: int, smollm: Tokenizer) -> None:
    segments = [Segment("<|im_start|>a b", True), Segment(" c", False), Segment("<|im_end|>", True)]
    ids = smollm.encode_segments(segments)
    assert len(ids) == 5
    if most >= 5:
        assert smollm.encode_segments(segments, most=most) == ids
        return
    with pytest.raises(ContextLengthError) as caught:
        smollm.encode_segments(segments, most=most)
    assert (caught.value.num_prompt_tokens, caught.value.context_tokens) == (5, most)
