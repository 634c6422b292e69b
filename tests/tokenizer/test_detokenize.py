"""Text as it arrives: the same whatever the pieces, never half a character, nothing of a stop string."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from isthmus.errors import UsageError
from isthmus.tokenizer import Detokenizer, Tokenizer

from .texts import TEXTS
from .vocabularies import byte_level, sentencepiece

BYTES = Tokenizer.from_gguf(byte_level())  # each byte is a token: every text can be cut anywhere
PIECES = Tokenizer.from_gguf(
    sentencepiece({"\u2581": -9.0, "a": -8.0, "\u2581a": -1.0, "\u2581\u2581": -2.0})
)


def _ids(data: bytes) -> list[int]:
    one = {BYTES.token_bytes(i): i for i in range(256)}
    return [one[data[i : i + 1]] for i in range(len(data))]


def _push(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.push(i) for i in ids]


def _first_complete(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The definition: the stop string whose end comes first; among those that end there, the first given."""
    for end in range(1, len(text) + 1):
        for candidate in stop:
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate
    return text, None


@given(st.lists(st.integers(0, 257), max_size=40))
def test_pieces_join_to_what_decode_gives_at_once(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES)
    assert "".join(_push(detokenizer, ids)) + detokenizer.finish() == BYTES.decode(ids)


@given(st.lists(st.integers(0, PIECES.vocab_size - 1), max_size=20))
def test_the_same_with_prefix_spaces_and_byte_tokens(ids: list[int]) -> None:
    detokenizer = Detokenizer(PIECES)
    assert "".join(_push(detokenizer, ids)) + detokenizer.finish() == PIECES.decode(ids)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_no_piece_holds_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    pieces = [*_push(detokenizer, _ids(text.encode())), detokenizer.finish()]
    assert all(len(piece) <= 1 for piece in pieces)  # each character comes whole, with its last byte
    assert "".join(pieces) == text


def test_half_a_character_at_the_end_is_the_replacement_character() -> None:
    detokenizer = Detokenizer(BYTES)
    assert _push(detokenizer, _ids("é☃".encode()[:-1])) == ["", "é", "", ""]
    assert detokenizer.finish() == "\ufffd"


@settings(max_examples=300)
@given(st.text("abAé\n", max_size=24), st.lists(st.text("abé\n", min_size=1, max_size=5), max_size=3))
def test_stop_strings_end_the_text_wherever_tokens_divide_it(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(BYTES, stop)
    joined = "".join(_push(detokenizer, _ids(text.encode()))) + detokenizer.finish()
    assert (joined, detokenizer.stopped) == _first_complete(text, stop)


@given(st.text("ab", max_size=16), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=2))
def test_what_is_held_back_is_only_what_may_become_a_stop_string(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(BYTES, stop)
    shown = ""
    for end, token in enumerate(_ids(text.encode()), 1):
        shown += detokenizer.push(token)
        if detokenizer.stopped is None:
            held = text[:end].removeprefix(shown)
            assert not held or any(candidate.startswith(held) for candidate in stop)


def test_a_beginning_that_comes_to_nothing_is_shown_and_flushed() -> None:
    detokenizer = Detokenizer(BYTES, ["STOP"])
    assert _push(detokenizer, _ids(b"aSTxSTO")) == ["a", "", "", "STx", "", "", ""]
    assert detokenizer.finish() == "STO"
    assert detokenizer.stopped is None


def test_a_stop_string_inside_one_token_cuts_the_token() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(merges=["a b", "ab c"]))
    (token,) = tokenizer.encode("abc", add_special=False, parse_special=False)
    detokenizer = Detokenizer(tokenizer, ["b"])
    assert (detokenizer.push(token), detokenizer.stopped) == ("a", "b")
    assert (detokenizer.push(token), detokenizer.finish()) == ("", "")  # after the stop there is nothing


def test_a_stop_string_may_name_a_special_token(smollm: Tokenizer) -> None:
    ids = smollm.encode("Hi<|im_start|>x", add_special=False, parse_special=True)
    detokenizer = Detokenizer(smollm, ["<|im_start|>"])
    assert "".join(_push(detokenizer, ids)) == "Hi"
    assert detokenizer.stopped == "<|im_start|>"


def test_special_tokens_are_not_shown(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>Hi<|im_end|>", add_special=False, parse_special=True)
    detokenizer = Detokenizer(smollm)
    assert "".join(_push(detokenizer, ids)) + detokenizer.finish() == "Hi"


def test_the_prefix_space_goes_at_the_start_of_an_answer_and_stays_in_a_continuation() -> None:
    ids = PIECES.encode("a a", add_special=False, parse_special=False)
    assert _push(Detokenizer(PIECES), ids) == ["a", " a"]
    assert _push(Detokenizer(PIECES, continues=True), ids) == [" a", " a"]


@pytest.mark.parametrize("stop", ["text", [""], [3], ["a", ""]])
def test_stop_strings_that_cannot_be_meant(stop: object) -> None:
    with pytest.raises(UsageError, match="stop must be a list of texts, none of them empty"):
        Detokenizer(BYTES, stop)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 258, 1 << 31])
def test_ids_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(UsageError, match="outside the vocabulary"):
        Detokenizer(BYTES).push(token)
