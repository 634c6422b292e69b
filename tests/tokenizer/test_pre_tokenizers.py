"""Where each pre-tokenizer rule cuts, written out by hand from the published patterns."""

from inspect import signature

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from isthmus.tokenizer import Tokenizer, TokenizerWarning
from isthmus.tokenizer.byte_level import to_bytes
from isthmus.tokenizer.gguf_tokenizer import pre_tokenizer
from isthmus.tokenizer.pre_tokenizers import TABLE

from .vocabularies import byte_level

# One line a rule: the words of a text, divided by "|".
_CUTS = {
    ("gpt-2", "It's  12345 x"): "It|'s| | 12345| x",
    ("gpt-2", "HE'LL a\n\n b"): "HE|'|LL| a|\n\n| b",
    ("default", "it's $5, 1234"): "it|'|s| |$|5|,| |123|4",
    ("smollm", "in 2024 (42%)"): "in| |2|0|2|4| (|4|2|%)",
    ("refact", "x1 = 10"): "x|1| =| |1|0",
    ("starcoder", "a10b"): "a|1|0|b",
    ("command-r", "v2.5"): "v|2|.|5",
    ("falcon", "Hi!? 12345"): "Hi|!?| |123|45",
    ("llama-bpe", "It'S 12345 a_b\n\n  c"): "It|'S| |123|45| a|_b|\n\n| | c",
    ("llama-bpe", "wait...\n (ok)"): "wait|...\n| (|ok|)",
    ("dbrx", "1234"): "123|4",
    ("glm4", "1234 don't"): "123|4| don|'t",
    ("minimax-m2", "parseJSON it's 1234 //\n"): "parse|JSON| it's| |123|4| //\n",
    ("qwen2", "It'S 123 a.b"): "It|'S| |1|2|3| a|.b",
    ("qwen2", "नमस्ते"): "नमस|्त|े",
    ("qwen35", "नमस्ते 12"): "नमस्ते| |1|2",
    ("deepseek-llm", "Hello, world 123"): "Hello|,| world| |1|2|3",
    ("deepseek-llm", "a\n\nb中文字 ok"): "a|\n|\n|b|中文字| ok",
    ("deepseek-llm", "ещё раз"): "ещё| раз",
    ("deepseek-llm", "ещё ὦ"): "ещё| |ὦ",  # the later step for U+0800 to U+4E00 cuts inside words, too
    ("deepseek-coder", "if x1: go\n"): "if| x|1|:| go|\n",
    ("deepseek-v3", "In 2024, +abc 12345"): "In| |202|4|,| +|abc| |123|45",
    ("deepseek-v3", "x.foo() 中文かなABC"): "x|.foo|()| |中文かな|ABC",
    ("deepseek-v3", "ok!\n\n  y"): "ok|!\n\n| | y",
    ("kimi-k2", "Hello中文World's 12345"): "Hello|中文|World's| |123|45",
    ("kimi-k2", "parseJSON don'T"): "parse|JSON| don'T",
    ("gpt-4o", "parseJSON it's 1234"): "parse|JSON| it's| |123|4",
    ("gpt-4o", "a //\n\nb"): "a| //\n\n|b",
    ("tekken", "HelloWorld it's 12"): "Hello|World| it|'s| |1|2",
    ("bailingmoe", "don't\n\n12"): "don|'t|\n\n|1|2",
}


@pytest.mark.parametrize(("pre", "text"), _CUTS)
def test_words(pre: str, text: str) -> None:
    words = [to_bytes(word).decode() for word, _ in pre_tokenizer(TABLE[pre]).pre_tokenize_str(text)]
    assert words == _CUTS[pre, text].split("|")


# transformers' own table for GGUF files, which lacks GLM: its converter of tiktoken's vocabularies, of which
# GLM's is one, has the pattern.
_GLM = signature(TikTokenConverter).parameters["pattern"].default
_SPLITS = {pre: split for pre, split in GGUF_PRE_TOKENIZER_SPLITS.items() if pre in TABLE}
_SPLITS |= {"glm4": _GLM, "chatglm-bpe": _GLM}
_TEXTS = [
    "It's DON'T we'LL  12345 x_y\r\n\n  z\t\t!",
    "HelloWorld parseJSON XMLHttp aB\u0301c \u01c5 中文 한국어 नमस्ते ١٢٣٤",
    "def f(x):\n    return x[0] // 2  # -> None\n\n\n/path/to/файл.txt ...\u00a0\u3000 '' \"q\" 👩‍🚀",
]


@pytest.mark.parametrize("pre", _SPLITS)
def test_words_are_transformers(pre: str) -> None:
    split = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
    theirs = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    for text in _TEXTS:
        assert pre_tokenizer(TABLE[pre]).pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", TABLE)
def test_every_rule_keeps_all_bytes(pre: str) -> None:
    text = "Ünï 中文 12345  x'S\r\n\t!?\u0301 नमस्ते 👩‍🚀 "
    words = [to_bytes(word) for word, _ in pre_tokenizer(TABLE[pre]).pre_tokenize_str(text)]
    assert b"".join(words) == text.encode()


@pytest.mark.parametrize(
    ("pre", "said"), [(None, "is missing"), ("gpt-9", "is 'gpt-9', which Isthmus does not know")]
)
def test_a_missing_or_unknown_rule_warns_and_takes_the_default(pre: str | None, said: str) -> None:
    with pytest.warns(
        TokenizerWarning, match=rf"tokenizer\.ggml\.pre {said}: text is split by the rule 'default'"
    ):
        tokenizer = Tokenizer.from_gguf(byte_level(merges=["' s"], pre=pre))
    # 'default' cuts at every punctuation mark; under GPT-2's rule "'s" would be one word and one token.
    assert len(tokenizer.encode("it's", add_special=False, parse_special=False)) == 4


def test_normalisation_is_the_models_own() -> None:
    decomposed = "e\u0301"  # two characters that NFC joins
    for pre, num_bytes in {"qwen2": 2, "llama-bpe": 3}.items():
        tokenizer = Tokenizer.from_gguf(byte_level(pre=pre))
        assert len(tokenizer.encode(decomposed, add_special=False, parse_special=False)) == num_bytes, pre
