"""SentencePiece vocabularies against the sentencepiece library itself, on models trained here."""

import io
from typing import Any

import pytest
import sentencepiece

from isthmus.tokenizer import Tokenizer

from .texts import TEXTS
from .vocabularies import sentencepiece as sentencepiece_metadata


def _train(add_dummy_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    """As Llama 2's was trained: BPE, byte fallback, digits apart, text left as it is."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS.values() if "\x00" not in text] * 8),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        max_sentence_length=1 << 16,
        minloglevel=3,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _metadata(model: sentencepiece.SentencePieceProcessor, add_space_prefix: bool) -> dict[str, Any]:
    """What a converter writes into GGUF."""
    ids = range(model.vocab_size())
    kinds = [(model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((t for is_kind, t in kinds if is_kind(i)), 1) for i in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix space", "no prefix space"])
def test_ids_and_texts_are_those_of_the_sentencepiece_library(prefix: bool) -> None:
    model = _train(add_dummy_prefix=prefix)
    tokenizer = Tokenizer.from_gguf(_metadata(model, add_space_prefix=prefix))
    for name, text in TEXTS.items():
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert ids == model.encode(text), name
        assert tokenizer.decode(ids) == text, name


def test_the_best_score_merges_first() -> None:
    #  "abc": "bc" scores higher than "ab", so the b goes to the c.
    pieces = {"a": -5.0, "b": -6.0, "c": -7.0, "ab": -2.0, "bc": -1.0}
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(pieces, add_space_prefix=False))
    ids = tokenizer.encode("abc", add_special=False, parse_special=False)
    assert [tokenizer.token_text(i) for i in ids] == ["a", "bc"]


def test_unknown_characters_fall_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata({"\u2581": -1.0}, add_space_prefix=False))
    ids = tokenizer.encode("\u2603", add_special=False, parse_special=False)
    assert [tokenizer.token_text(i) for i in ids] == ["<0xE2>", "<0x98>", "<0x83>"]
    assert tokenizer.decode(ids) == "\u2603"


def test_text_that_reads_like_a_special_or_byte_token_stays_text() -> None:
    # Every split of "</s>" and "<0x0A>" is a token, so careless merges from scores would build them.
    pieces = {text: -1.0 for text in ("<", "/", "s", ">", "</", "</s", "s>", "/s>", "0", "x", "A", "<0x0A")}
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(pieces, add_space_prefix=False))
    for text in ("</s>", "<0x0A>", "<unk>"):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert len(ids) > 1
        assert tokenizer.decode(ids) == text
        assert not any(map(tokenizer.is_special, ids))


def test_the_prefix_space_comes_once_at_the_start_and_after_special_tokens() -> None:
    metadata = sentencepiece_metadata({"\u2581": -3.0, "a": -2.0, "\u2581a": -1.0}, control=["<sep>"])
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("a a<sep>a", add_special=True, parse_special=True)
    assert [tokenizer.token_text(i) for i in ids] == ["<s>", "\u2581a", "\u2581a", "<sep>", "\u2581a"]
    assert tokenizer.decode(ids[:3]) == "a a"
