"""Metadata that cannot be meant: each error names the key, what it holds and what it must hold."""

import re
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import MalformedFileError, ModelFileError, UnsupportedError
from isthmus.tokenizer import Tokenizer
from isthmus.weights.metadata import Metadata

from .vocabularies import byte_level, sentencepiece

_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no model": (byte_level(model=None), "tokenizer.ggml.model is missing"),
    "model of another type": (byte_level(model=7), "tokenizer.ggml.model is 7 (int); it must be a str"),
    "no tokens": (byte_level(tokens=None), "tokenizer.ggml.tokens is missing"),
    "tokens no list": (byte_level(tokens="abc"), "tokenizer.ggml.tokens is a str; it must be a list"),
    "tokens empty": (byte_level(tokens=[]), "tokenizer.ggml.tokens is empty"),
    "a token that is a number": (byte_level(tokens=["a", 5]), "tokenizer.ggml.tokens[1] is 5"),
    "a token without text": (byte_level(control=["", "b"]), "tokenizer.ggml.tokens[256] is an empty text"),
    "a token twice": (byte_level(control=["a", "b"]), "tokenizer.ggml.tokens[256] is 'a', which is token 64"),
    "no merges": (
        byte_level(merges=["a b"]) | {"tokenizer.ggml.merges": None},
        "tokenizer.ggml.merges is missing",
    ),
    "a merge with an unknown part": (
        byte_level() | {"tokenizer.ggml.merges": ["a b"]},
        "tokenizer.ggml.merges[0] is 'a b', but 'ab' is not among the 258 tokens",
    ),
    "a merge that is no pair": (
        byte_level(merges=["a b"]) | {"tokenizer.ggml.merges": ["a b", "ab"]},
        "tokenizer.ggml.merges[1] is 'ab'",
    ),
    "types of another length": (
        byte_level(token_type=[1, 1]),
        "tokenizer.ggml.token_type has 2 entries for 258 tokens",
    ),
    "a type that does not exist": (
        byte_level(token_type=[1] * 257 + [9]),
        "tokenizer.ggml.token_type[257] is 9; ggml's token types are 0 to 6",
    ),
    "types that are texts": (
        byte_level(token_type=["1"] * 258),
        "tokenizer.ggml.token_type must be a list of numbers",
    ),
    "bos outside": (
        byte_level(bos_token_id=258),
        "tokenizer.ggml.bos_token_id is 258, outside the vocabulary of 258",
    ),
    "eos negative": (byte_level(eos_token_id=-1), "tokenizer.ggml.eos_token_id is -1, outside"),
    "eot no id": (
        byte_level(eot_token_id="<|eot|>"),
        "tokenizer.ggml.eot_token_id is '<|eot|>'; it must be a token id",
    ),
    "padding outside": (
        byte_level(padding_token_id=1 << 31),
        "tokenizer.ggml.padding_token_id is 2147483648",
    ),
    "add_bos no bool": (byte_level(add_bos_token="yes"), "tokenizer.ggml.add_bos_token is 'yes' (str)"),
    "template no text": (
        byte_level(**{"tokenizer.chat_template": ["{{ x }}"]}),
        "tokenizer.chat_template is ['{{ x }}'] (list)",
    ),
    "no scores": (sentencepiece({"a": 0.0}, scores=None), "tokenizer.ggml.scores is missing"),
    "scores of another length": (
        sentencepiece({"a": 0.0}, scores=[0.0]),
        "tokenizer.ggml.scores has 1 entries",
    ),
    "a score that is no number": (
        sentencepiece({"a": float("nan")}),
        "tokenizer.ggml.scores[259] is not a number",
    ),
    "a byte token that names none": (
        sentencepiece({"<0xZZ>": 0.0}, token_type=[2, 3, 3] + [6] * 257),
        "tokenizer.ggml.tokens[259] is '<0xZZ>' of type byte",
    ),
}


@pytest.mark.parametrize("case", _CASES)
def test_malformed_metadata(case: str) -> None:
    metadata, said = _CASES[case]
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(MalformedFileError, match=re.escape(said)) as caught:
        Tokenizer.from_gguf(metadata)
    assert isinstance(caught.value, ModelFileError)


def test_a_tokenizer_kind_that_is_not_supported() -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.model is 't5'; Isthmus reads 'gpt2'"):
        Tokenizer.from_gguf(byte_level(model="t5"))


def test_a_merge_that_would_build_a_control_token_is_dropped() -> None:
    metadata = byte_level(merges=["a b"], control=["abc", "z!"])
    metadata["tokenizer.ggml.merges"] += ["ab c"]
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("abc", add_special=False, parse_special=False)
    assert [tokenizer.token_text(i) for i in ids] == ["ab", "c"]


@pytest.mark.parametrize("metadata", [byte_level(tokens=[]), byte_level(model="rwkv9")])
def test_an_error_names_the_file_that_it_is_of(metadata: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError) as alone:
        Tokenizer.from_gguf(metadata)
    with pytest.raises(ModelFileError) as of_file:
        Tokenizer.from_gguf(Metadata(metadata, Path("some/model.gguf")))
    assert type(of_file.value) is type(alone.value)
    assert str(of_file.value) == f"some/model.gguf: {alone.value}"
