"""A checked `Vocabulary` onto the tokenizers library: the model that turns ordinary text into ids.

The backend built here knows no special tokens at all: it holds only tokens that ordinary text may become, so
no text whatever can turn into a control token. Special tokens are found before it, in `Tokenizer`.
"""

from __future__ import annotations

import warnings
from operator import itemgetter

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from isthmus.errors import MalformedFileError
from isthmus.tokenizer.byte_level import CHARACTER, RARE
from isthmus.tokenizer.pre_tokenizers import TABLE, PreTokenizer, Step
from isthmus.tokenizer.vocabulary import TokenizerWarning, TokenType, Vocabulary

Merge = tuple[str, str]


def build_byte_level(vocabulary: Vocabulary, pre: PreTokenizer, excluded: frozenset[int]) -> Tokenizer:
    """Byte-level BPE (`tokenizer.ggml.model` = gpt2). `excluded`: ids that ordinary text never becomes."""
    ids = _ordinary_tokens(vocabulary, excluded)
    lost = [b for b, character in CHARACTER.items() if character not in ids and b not in RARE]
    if lost:
        warnings.warn(
            f"tokenizer.ggml.tokens has no token for {len(lost)} bytes, the first 0x{lost[0]:02x}: "
            "text that needs them is dropped",
            TokenizerWarning,
            stacklevel=4,
        )
    backend = Tokenizer(_bpe(vocabulary, ids, pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(pre)
    return backend


def build_sentencepiece(vocabulary: Vocabulary, excluded: frozenset[int]) -> Tokenizer:
    """SentencePiece BPE with byte fallback (`tokenizer.ggml.model` = llama); spaces must come as U+2581.

    SentencePiece joins the pair whose token scores highest. As a list of merges, as Hugging Face converts it,
    that is every split of every token into two tokens, in falling order of score.
    """
    ids = _ordinary_tokens(vocabulary, excluded)
    unknown = vocabulary.tokens[vocabulary.ids["unknown"]] if "unknown" in vocabulary.ids else None
    if unknown is not None:
        ids[unknown] = vocabulary.ids["unknown"]
    merges = merges_from_scores(vocabulary, excluded)
    return Tokenizer(BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))


def find_pre_tokenizer(name: str | None) -> PreTokenizer:
    """The table's entry; a missing or unknown name warns and takes `default`."""
    if name in TABLE:
        return TABLE[name]
    came = "is missing" if name is None else f"is {name!r}, which Isthmus does not know"
    warnings.warn(
        f"tokenizer.ggml.pre {came}: text is split by the rule 'default', so the model may see other tokens "
        f"than it was trained on, and answer worse. Convert the model again with one of: {', '.join(TABLE)}",
        TokenizerWarning,
        stacklevel=4,
    )
    return TABLE["default"]


def pre_tokenizer(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The steps as one tokenizers object, whose pieces are in the byte-level alphabet."""
    steps = [_step(step) for step in pre.steps]
    if Step.GPT2_WORDS not in pre.steps:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _step(step: str | Step) -> pre_tokenizers.PreTokenizer:
    match step:
        case Step.DIGITS:
            return pre_tokenizers.Digits(individual_digits=True)
        case Step.DIGIT_RUNS:
            return pre_tokenizers.Digits(individual_digits=False)
        case Step.PUNCTUATION:
            return pre_tokenizers.Punctuation("contiguous")
        case Step.GPT2_WORDS:
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Split(Regex(step), "isolated")


def _ordinary_tokens(vocabulary: Vocabulary, excluded: frozenset[int]) -> dict[str, int]:
    ids = dict(zip(vocabulary.tokens, range(len(vocabulary.tokens)), strict=True))
    for token in excluded:
        del ids[vocabulary.tokens[token]]
    return ids


def _bpe(vocabulary: Vocabulary, ids: dict[str, int], ignore_merges: bool) -> BPE:
    merges = list(map(_parts, vocabulary.merges))
    lefts, rights = map(itemgetter(0), merges), map(itemgetter(1), merges)
    joined = (left + right for left, right in merges)
    # The library answers a merge of unknown tokens with a Rust panic, so all are checked here .
    if not all(all(map(ids.__contains__, tokens)) for tokens in (lefts, rights, joined)):
        merges = _usable_merges(vocabulary, merges, ids)
    return BPE(ids, merges, ignore_merges=ignore_merges)


def _parts(merge: str) -> Merge:
    """A merge is "left right"; a part may itself begin with a space, never contain another."""
    left, _, right = merge.partition(" ")
    if left:
        return left, right
    left, _, right = merge[1:].partition(" ")
    return " " + left, right


def _usable_merges(vocabulary: Vocabulary, merges: list[Merge], ids: dict[str, int]) -> list[Merge]:
    """Merges without those that could only build an excluded token; MalformedFileError for an unknown one."""
    known = set(vocabulary.tokens)
    for index, (left, right) in enumerate(merges):
        for part in (left, right, left + right):
            if part not in known:
                raise MalformedFileError(
                    f"tokenizer.ggml.merges[{index}] is {vocabulary.merges[index]!r}, but {part!r} is not "
                    f"among the {len(known)} tokens of tokenizer.ggml.tokens"
                )
    return [(left, right) for left, right in merges if left in ids and right in ids and left + right in ids]


def merges_from_scores(vocabulary: Vocabulary, excluded: frozenset[int]) -> list[Merge]:
    """Every split of a normal token into two tokens, best score first, among equals longer left parts first.

    Byte tokens and special tokens neither split nor serve as parts: no merge of text leads to them.
    """
    assert vocabulary.scores is not None
    mergeable = {TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNDEFINED}
    usable = np.isin(vocabulary.types, list(mergeable))
    tokens = {
        text: token for token, text in enumerate(vocabulary.tokens) if usable[token] and token not in excluded
    }
    scores = vocabulary.scores.tolist()
    found: list[tuple[float, int, str, str]] = []
    for text, token in tokens.items():
        for cut in range(len(text) - 1, 0, -1):
            if text[:cut] in tokens and text[cut:] in tokens:
                found.append((-scores[token], -cut, text[:cut], text[cut:]))
    found.sort(key=itemgetter(0, 1))
    return [(left, right) for _, _, left, right in found]
