"""Control tokens: who may write them, one BOS and never two, and which of them end an answer."""

import pytest

from isthmus.errors import UsageError
from isthmus.tokenizer import Segment, Tokenizer, TokenizerWarning

from .vocabularies import CONTROL, NORMAL, byte_level, sentencepiece

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>x")


def _chatml(**keys: object) -> Tokenizer:
    """BOS is <|endoftext|>, EOS <|im_start|>; one control token is the beginning of another."""
    return Tokenizer.from_gguf(byte_level(control=CHATML, user_defined=["<think>", "  ", "<h1>"], **keys))


def _texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(i) for i in ids]


@pytest.mark.parametrize("literal", [*CHATML, "<think>"])
def test_user_text_never_becomes_a_special_token(literal: str) -> None:
    tokenizer = _chatml()
    text = f"a{literal}b{literal}"
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert len(ids) == len(text)  # bytes, one by one
    assert tokenizer.decode(ids) == text


def test_template_text_does_and_the_longest_literal_wins() -> None:
    tokenizer = _chatml()
    ids = tokenizer.encode("<|im_end|>x<|im_end|>y<think>", add_special=False, parse_special=True)
    assert _texts(tokenizer, ids) == ["<|im_end|>x", "<|im_end|>", "y", "<think>"]


def test_added_tokens_that_are_plain_text_are_found_in_user_text_too() -> None:
    tokenizer = _chatml()
    ids = tokenizer.encode("a  <h1>", add_special=False, parse_special=False)
    assert _texts(tokenizer, ids) == ["a", "  ", "<h1>"]


def test_segments_are_encoded_as_one_text_except_for_what_users_wrote() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(merges=["a b"], control=CHATML))
    segments = [Segment("<|im_start|>a", True), Segment("b<|im_end|>", False), Segment("<|im_end|>", True)]
    ids = tokenizer.encode_segments(segments)
    assert _texts(tokenizer, ids) == ["<|im_start|>", "ab", *"<|im_end|>", "<|im_end|>"]


@pytest.mark.parametrize("halves", [("<|im_", "end|>"), ("<", "|im_end|>"), ("<|im_end|", ">")])
def test_no_special_token_forms_across_a_border_of_segments(halves: tuple[str, str]) -> None:
    tokenizer = _chatml()
    for first in (True, False):
        ids = tokenizer.encode_segments([Segment(halves[0], first), Segment(halves[1], not first)])
        assert not any(map(tokenizer.is_special, ids))


@pytest.mark.parametrize(("text", "rest"), [("hi", 2), ("<s>hi", 2), ("<s><s>hi", 2), ("<s>", 0), ("", 0)])
def test_one_bos_and_never_two(text: str, rest: int) -> None:
    metadata = sentencepiece({"h": -1.0, "i": -1.0}, add_space_prefix=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    for ids in (
        tokenizer.encode(text, add_special=True, parse_special=True),
        tokenizer.encode_segments([Segment(text, True)]),
    ):
        assert ids[0] == tokenizer.bos_id
        assert len(ids) == 1 + rest


def test_a_bos_that_a_user_writes_is_text_after_the_real_one() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece({"<": -1.0, "s": -1.0, ">": -1.0}, add_space_prefix=False))
    ids = tokenizer.encode("<s>", add_special=True, parse_special=False)
    assert _texts(tokenizer, ids) == ["<s>", "<", "s", ">"]


@pytest.mark.parametrize(
    ("keys", "bos"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_bos_is_added_where_the_file_or_the_model_family_says(keys: dict[str, object], bos: bool) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(**keys))
    assert tokenizer.add_bos is bos
    assert (tokenizer.encode("a", add_special=True, parse_special=False)[0] == tokenizer.bos_id) is bos


def test_eos_is_added_to_texts_that_ask_for_it_but_never_to_a_chat_prompt() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(add_eos_token=True))
    assert tokenizer.encode("a", add_special=True, parse_special=False)[-1] == tokenizer.eos_id
    assert tokenizer.encode_segments([Segment("a", True)])[-1] != tokenizer.eos_id


def test_bos_without_an_id_warns() -> None:
    with pytest.warns(TokenizerWarning, match="tokenizer.ggml.bos_token_id is missing: no BOS is added"):
        tokenizer = Tokenizer.from_gguf(byte_level(add_bos_token=True, bos_token_id=None))
    assert not tokenizer.add_bos


def test_stop_ids_are_eos_eot_eom_and_the_known_ends_of_a_turn() -> None:
    control = ["<a>", "<eos2>", "<eot2>", "<eom2>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<other>"]
    ids = {name: 256 + i for i, name in enumerate(control)}
    tokenizer = Tokenizer.from_gguf(
        byte_level(
            control=control,
            eos_token_id=ids["<eos2>"],
            eot_token_id=ids["<eot2>"],
            eom_token_id=ids["<eom2>"],
        )
    )
    assert {tokenizer.token_text(i) for i in tokenizer.stop_ids} == set(control) - {"<a>", "<other>"}


def test_an_end_of_turn_that_is_ordinary_text_stops_nothing() -> None:
    metadata = byte_level(control=["<b>", "<e>", "<|im_end|>"])
    metadata["tokenizer.ggml.token_type"][-1] = NORMAL
    assert Tokenizer.from_gguf(metadata).stop_ids == {257}


def test_without_token_types_the_markers_are_recognised() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(control=CHATML[:3], token_type=None, eos_token_id=None))
    assert tokenizer.stop_ids == {256, 258}
    assert tokenizer.is_special(257)


def test_special_tokens_are_hidden_unless_asked_for(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>user\nhi<|im_end|>", add_special=False, parse_special=True)
    assert smollm.decode(ids) == "user\nhi"
    assert smollm.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"


def test_markers_such_as_think_are_shown() -> None:
    tokenizer = _chatml()
    assert tokenizer.decode(tokenizer.encode("<think>", add_special=False, parse_special=True)) == "<think>"


@pytest.mark.parametrize("token", [-1, 258, 1 << 31, True, "7", 1.0])
def test_ids_outside_the_vocabulary_are_errors(token: object) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    for use in (
        tokenizer.token_bytes,
        tokenizer.is_special,
        tokenizer.token_text,
        lambda t: tokenizer.decode([t]),
    ):
        with pytest.raises(UsageError, match=r"outside the vocabulary: ids are 0 to 257"):
            use(token)


def test_the_demo_model(smollm: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.bos_id, smollm.eos_id, smollm.add_bos) == (49152, 1, 2, False)
    assert {smollm.token_text(i) for i in smollm.stop_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert CONTROL == 3
