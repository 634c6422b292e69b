"""Byte-level BPE on a published vocabulary, against transformers' and tokenizers' own constructions of it."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import tokenizers
from transformers import GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer

from isthmus.tokenizer import Tokenizer

from .texts import TEXTS

# The pre_tokenizer of SmolLM2's tokenizer.json, as published.
_SMOLLM = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    return vocab, [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]


def _published_smollm(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    vocab, merges = _vocabulary(metadata)
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    empty = {"normalizer": None, "post_processor": None, "decoder": None, "truncation": None, "padding": None}
    published = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": _SMOLLM, **empty}
    return tokenizers.Tokenizer.from_str(json.dumps(published))


def _oracle(pre: str, metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Other people's tokenizer for this rule, with SmolLM2's vocabulary and merges."""
    vocab, merges = _vocabulary(metadata)
    if pre == "smollm":
        return _published_smollm(metadata)
    classes = {"gpt-2": GPT2Tokenizer, "olmo": GPTNeoXTokenizer, "qwen2": Qwen2Tokenizer}
    if pre in classes:
        return classes[pre](vocab=vocab, merges=merges).backend_tokenizer
    fields = {"tokens": list(vocab), "merges": [" ".join(merge) for merge in merges], "token_type": []}
    return convert_gguf_tokenizer("llama", {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre, **fields})[0]


@pytest.mark.parametrize(
    "pre", ["smollm", "gpt-2", "olmo", "qwen2", "llama-bpe", "tekken", "gpt-4o", "deepseek-r1-qwen", "dbrx"]
)
def test_ids_are_those_of_other_implementations(pre: str, smollm_metadata: Mapping[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf({**smollm_metadata, "tokenizer.ggml.pre": pre})
    oracle = _oracle(pre, smollm_metadata)
    # `ignore_merges`, which GGUF implies by the name of the rule, is no setting of the oracle's builder.
    oracle.model.ignore_merges = pre in ("llama-bpe", "tekken")
    for name, text in TEXTS.items():
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False, parse_special=False) == expected, name


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "control"])
def test_decoding_gives_the_text_back(name: str, smollm: Tokenizer) -> None:
    ids = smollm.encode(TEXTS[name], add_special=False, parse_special=False)
    assert smollm.decode(ids) == TEXTS[name]
    assert b"".join(map(smollm.token_bytes, ids)) == TEXTS[name].encode()


def test_decoding_equals_the_library(smollm: Tokenizer, smollm_metadata: Mapping[str, Any]) -> None:
    oracle = _published_smollm(smollm_metadata)
    oracle.decoder = tokenizers.decoders.ByteLevel()
    for start in range(20, 49000, 997):  # any ids, so most are no whole characters
        ids = list(range(start, start + 40))
        assert smollm.decode(ids) == oracle.decode(ids)


def test_a_word_that_is_a_token_ignores_merges_where_the_model_says_so() -> None:
    from .vocabularies import byte_level

    # No merge leads to "abc", so only `ignore_merges` (Llama 3) can give it.
    metadata = byte_level(merges=["b c"])
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [*tokens[:256], "bc", "abc", *tokens[257:]]
    metadata["tokenizer.ggml.token_type"].insert(256, 1)
    metadata |= {"tokenizer.ggml.bos_token_id": 258, "tokenizer.ggml.eos_token_id": 259}
    texts = {}
    for pre in ("llama-bpe", "dbrx"):
        tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": pre})
        ids = tokenizer.encode("abc", add_special=False, parse_special=False)
        texts[pre] = [tokenizer.token_text(i) for i in ids]
    assert texts == {"llama-bpe": ["abc"], "dbrx": ["a", "bc"]}
