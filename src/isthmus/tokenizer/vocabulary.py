"""The `tokenizer.*` keys of GGUF metadata, read into one checked, frozen record.

After `Vocabulary.from_gguf` every later step may trust it: all arrays have one length, every id is inside the
vocabulary, every token has a text and no two the same. It knows the keys (ggml's names) and their defaults,
not how text is split. Defaults follow llama.cpp, where the files come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.errors import MalformedFileError, UnsupportedError
from isthmus.tokenizer.markers import looks_like_control

_PREFIX = "tokenizer.ggml."

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

# Ids a file may name. "unknown" and "padding" are ggml's spelling of the keys.
_ID_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding")

# SentencePiece files of the first GGUF versions leave these out; llama.cpp assumes Llama's own.
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}


class TokenizerWarning(UserWarning):
    """The tokenizer works, but the file leaves something open that may degrade the output."""


class TokenType(IntEnum):
    """ggml's values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """`types`: [vocab] uint8 of TokenType. `scores`: [vocab] float64, or None. `merges`: "left right"."""

    model: str
    pre: str | None
    tokens: list[str]
    types: npt.NDArray[np.uint8]
    scores: npt.NDArray[np.float64] | None
    merges: list[str]
    ids: Mapping[str, int]
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Raises MalformedFileError or UnsupportedError with the key, what it holds and what it must hold."""
        model = _model(metadata)
        tokens = _tokens(metadata)
        sentencepiece = model == "llama"
        return cls(
            model=model,
            pre=_optional(metadata, _PREFIX + "pre", str),
            tokens=tokens,
            types=_types(metadata, tokens, sentencepiece),
            scores=_scores(metadata, len(tokens), required=sentencepiece),
            merges=[] if sentencepiece else _strings(metadata, _PREFIX + "merges"),
            ids=_ids(metadata, len(tokens), _SENTENCEPIECE_IDS if sentencepiece else {}),
            add_bos=_optional(metadata, _PREFIX + "add_bos_token", bool),
            add_eos=_optional(metadata, _PREFIX + "add_eos_token", bool) or False,
            add_space_prefix=_space_prefix(metadata, default=sentencepiece),
            chat_template=_optional(metadata, "tokenizer.chat_template", str),
        )

    def of_type(self, *types: TokenType) -> list[int]:
        """Ids of these types, in order."""
        return [int(i) for i in np.flatnonzero(np.isin(self.types, types))]


def _optional(metadata: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    value = metadata.get(key)
    if value is None or isinstance(value, kind):
        return value
    if kind is bool and isinstance(value, np.bool_):
        return bool(value)
    raise MalformedFileError(f"{key} is {value!r} ({type(value).__name__}); it must be a {kind.__name__}")


def _space_prefix(metadata: Mapping[str, Any], default: bool) -> bool:
    value = _optional(metadata, _PREFIX + "add_space_prefix", bool)
    return default if value is None else bool(value)


def _model(metadata: Mapping[str, Any]) -> str:
    model = _optional(metadata, _PREFIX + "model", str)
    if model is None:
        raise MalformedFileError(
            f"{_PREFIX}model is missing: the file carries no tokenizer; convert the model again"
        )
    if model not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{_PREFIX}model is {model!r}; Isthmus reads 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    return str(model)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if value is None:
        raise MalformedFileError(f"{key} is missing; it must be a list of strings")
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise MalformedFileError(f"{key} is a {type(value).__name__}; it must be a list of strings")
    strings = value if isinstance(value, list) else list(value)
    others = set(map(type, strings)) - {str}
    if others:
        index = next(i for i, item in enumerate(strings) if type(item) is not str)
        raise MalformedFileError(f"{key}[{index}] is {strings[index]!r}; every entry must be a string")
    return strings


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    key = _PREFIX + "tokens"
    tokens = _strings(metadata, key)
    if not tokens:
        raise MalformedFileError(f"{key} is empty; a vocabulary needs at least one token")
    distinct = set(tokens)
    if "" in distinct:
        raise MalformedFileError(f"{key}[{tokens.index('')}] is an empty text; every token needs one")
    if len(distinct) != len(tokens):
        seen: dict[str, int] = {}
        for index, token in enumerate(tokens):
            if token in seen:
                raise MalformedFileError(f"{key}[{index}] is {token!r}, which is token {seen[token]} already")
            seen[token] = index
    return tokens


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> npt.NDArray[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    try:
        numbers = np.asarray(value)
        wrong = numbers.dtype.kind not in "iuf"
    except (ValueError, OverflowError):
        wrong = True
    if wrong or numbers.ndim != 1:
        raise MalformedFileError(
            f"{key} must be a list of numbers, got {type(value).__name__} of something else"
        )
    if len(numbers) != count:
        raise MalformedFileError(
            f"{key} has {len(numbers)} entries for {count} tokens; it needs one for each"
        )
    return numbers


def _types(metadata: Mapping[str, Any], tokens: list[str], sentencepiece: bool) -> npt.NDArray[np.uint8]:
    key = _PREFIX + "token_type"
    numbers = _numbers(metadata, key, len(tokens))
    if numbers is None:
        return np.array([_guessed_type(token, sentencepiece) for token in tokens], np.uint8)
    bad = np.flatnonzero((numbers < 0) | (numbers > max(TokenType)))
    if len(bad):
        raise MalformedFileError(
            f"{key}[{bad[0]}] is {numbers[bad[0]]}; ggml's token types are 0 to {max(TokenType)}"
        )
    types = numbers.astype(np.uint8)
    if sentencepiece:
        for token in np.flatnonzero(types == TokenType.BYTE):
            if not _BYTE_TOKEN.fullmatch(tokens[token]):
                raise MalformedFileError(
                    f"{_PREFIX}tokens[{token}] is {tokens[token]!r} of type byte; it must be <0x00> to <0xFF>"
                )
    return types


def _guessed_type(token: str, sentencepiece: bool) -> TokenType:
    if looks_like_control(token):
        return TokenType.CONTROL
    return TokenType.BYTE if sentencepiece and _BYTE_TOKEN.fullmatch(token) else TokenType.NORMAL


def _scores(metadata: Mapping[str, Any], count: int, required: bool) -> npt.NDArray[np.float64] | None:
    key = _PREFIX + "scores"
    numbers = _numbers(metadata, key, count)
    if numbers is None:
        if required:
            raise MalformedFileError(f"{key} is missing; a SentencePiece vocabulary merges by its scores")
        return None
    if np.isnan(numbers).any():
        raise MalformedFileError(f"{key}[{int(np.isnan(numbers).argmax())}] is not a number")
    return numbers.astype(np.float64)


def _ids(metadata: Mapping[str, Any], count: int, defaults: Mapping[str, int]) -> dict[str, int]:
    ids = {name: token for name, token in defaults.items() if token < count}
    for name in _ID_NAMES:
        key = f"{_PREFIX}{name}_token_id"
        value = metadata.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise MalformedFileError(f"{key} is {value!r}; it must be a token id")
        if not 0 <= value < count:
            raise MalformedFileError(f"{key} is {value}, outside the vocabulary of {count} tokens")
        ids[name] = int(value)
    return ids
