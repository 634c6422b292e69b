"""Tiny vocabularies as GGUF metadata, written out where a test must see every token."""

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.tokenizer.byte_level import CHARACTER

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_level(
    merges: Sequence[str] = (),
    control: Sequence[str] = ("<|begin|>", "<|end_of_text|>"),
    user_defined: Sequence[str] = (),
    **keys: Any,
) -> dict[str, Any]:
    """256 byte tokens (ids 0 to 255 in the alphabet's order), one token a merge, then special tokens.

    The first two control tokens are BOS and EOS. `keys` go under `tokenizer.ggml.`.
    """
    ordinary = [*CHARACTER.values(), *(merge.replace(" ", "") for merge in merges)]
    tokens = [*ordinary, *control, *user_defined]
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [NORMAL] * len(ordinary)
        + [CONTROL] * len(control)
        + [USER_DEFINED] * len(user_defined),
        "merges": list(merges),
        "bos_token_id": len(ordinary),
        "eos_token_id": len(ordinary) + 1,
    }
    return _prefixed(metadata | keys)


def sentencepiece(pieces: Mapping[str, float], control: Sequence[str] = (), **keys: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, 256 byte tokens, then `pieces` with their scores, then more control tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *control]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [CONTROL] * len(control)
    metadata: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 259 + list(pieces.values()) + [0.0] * len(control),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _prefixed(metadata | keys)


def _prefixed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}": value
        for key, value in metadata.items()
        if value is not None
    }
