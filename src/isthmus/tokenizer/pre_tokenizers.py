"""How byte-level BPE cuts text into words before it merges: a table from `tokenizer.ggml.pre` to the rule.

GGUF stores only a name for the rule. The patterns are those published in each model's own tokenizer.json (or
tiktoken `pat_str`), because that is what the model was trained with; llama.cpp's adapted patterns differ in
rare cases (normalisation, lone marks). A new name is one line of `TABLE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Step(Enum):
    """Steps the tokenizers library has built in; any other is a pattern whose matches stand alone."""

    DIGITS = "each digit alone"
    DIGIT_RUNS = "each run of digits alone"
    PUNCTUATION = "each run of punctuation alone"
    GPT2_WORDS = "GPT-2's word pattern, then bytes to the byte-level alphabet"


@dataclass(frozen=True)
class PreTokenizer:
    """`steps` are applied in order, each to the pieces the former left; `add_bos` is the default of its key.

    `ignore_merges`: a word that is a token is that token, whatever the merges say.
    """

    steps: tuple[str | Step, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letters: str = r"\p{L}+", symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """The pattern family that began with tiktoken's cl100k_base."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{symbols}|{_SPACES}"


def _o200k(digits: str, ending: str, symbols: str, without: str = "") -> str:
    """Words of one capitalisation: upper* lower+ | upper+ lower*, as in tiktoken's o200k_base."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}|{digits}|{symbols}|{_SPACES}"


_ASCII_SYMBOL = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_V3_WORDS = "|".join(
    (
        rf"{_ASCII_SYMBOL}[A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _SPACES,
    )
)

# Letters of the scripts that have case, as deepseek-llm lists them. Escapes, because editors that normalise
# to NFC turn U+1F7D, U+1FD3 and U+1FDB into other letters and the ranges around.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_GPT2 = PreTokenizer((Step.GPT2_WORDS,))
_DIGITS_THEN_GPT2 = PreTokenizer((Step.DIGITS, Step.GPT2_WORDS))
_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((_cl100k(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),), nfc=True)
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3_WORDS))
_GPT4O = PreTokenizer((_o200k(r"\p{N}{1,3}", _CONTRACTIONS + "?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

TABLE: dict[str, PreTokenizer] = {
    # llama.cpp's rule for files that name none or `default`: a guess that suits no model exactly.
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", Step.GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": PreTokenizer(_GPT2.steps, nfc=True),
    "olmo": PreTokenizer(_GPT2.steps, nfc=True),
    "smollm": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "command-r": PreTokenizer(_DIGITS_THEN_GPT2.steps, nfc=True),
    "falcon": PreTokenizer((Step.PUNCTUATION, Step.GPT2_WORDS, Step.DIGIT_RUNS, r"[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    "qwen2": _QWEN2,
    "megrez": _QWEN2,
    "hunyuan": PreTokenizer(_QWEN2.steps),
    "grok-2": PreTokenizer(_QWEN2.steps),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2.steps),
    "qwen35": PreTokenizer(
        (_cl100k(r"\p{N}", r"[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), nfc=True
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            Step.DIGITS,
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", Step.DIGITS)
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "kimi-k2": PreTokenizer(
        (
            r"[\p{Han}]+|"
            + _o200k(r"\p{N}{1,3}", _CONTRACTIONS + "?", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"&&[^\p{Han}]"),
        )
    ),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "minimax-m2": _GPT4O,
    "tekken": PreTokenizer(
        (_o200k(r"\p{N}", "", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),), ignore_merges=True, add_bos=True
    ),
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
}
