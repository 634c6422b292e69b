"""The templates of templates/*.jinja with the special tokens of the models that use them."""

# ruff: noqa: RUF001 (DeepSeek writes its markers with a fullwidth bar)

from pathlib import Path

from isthmus.tokenizer import ChatTemplate, Tokenizer

from .vocabularies import byte_level

_CHATML = ["<|im_start|>", "<|im_end|>"]

# name: control tokens (BOS first, EOS second), user-defined tokens
_TOKENS = {
    "chatml": (_CHATML, []),
    "llama3": (["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"], []),
    "mistral": (["<s>", "</s>", "[INST]", "[/INST]"], []),
    "deepseek": (
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        [
            *("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *(
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁outputs▁begin｜>",
                "<｜tool▁outputs▁end｜>",
            ),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ],
    ),
    "qwen3": (
        _CHATML,
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    ),
}

DIALECTS = list(_TOKENS)


def source(name: str) -> str:
    return (
        Path(__file__)
        .with_name("templates")
        .joinpath(f"{name}.jinja")
        .read_text(encoding="utf-8")
        .rstrip("\n")
    )


def tokenizer(name: str) -> Tokenizer:
    """A byte vocabulary with the dialect's special tokens and its template."""
    control, user_defined = _TOKENS[name]
    keys = {"tokenizer.chat_template": source(name)}
    return Tokenizer.from_gguf(byte_level(control=control, user_defined=user_defined, **keys))


def template(name: str) -> ChatTemplate:
    return ChatTemplate.for_tokenizer(tokenizer(name))
