"""Log-probabilities of an answer's tokens: which text each token is, and the two shapes OpenAI has for them.

The texts joined are the answer's text, whatever was held back, cut off by a stop string or split inside a
character: a token that only begins a character has no text, the one that completes it has all of it. The
bytes of each are there beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isthmus.engine.request import TokenLogprob
from isthmus.tokenizer import Detokenizer

if TYPE_CHECKING:
    from isthmus.tokenizer import Tokenizer


@dataclass
class ShownToken:
    """A token of the answer with the text it added to it. `logprob` is None for the first of a prompt."""

    text: str
    logprob: TokenLogprob | None


class TokenTexts:
    """Gives tokens out once all their text has been: so they never tell of text that was then cut off."""

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        self._detokenizer = Detokenizer(tokenizer, continues=continues)  # without stop strings
        self._held: list[ShownToken] = []
        self._num_shown = 0  # characters of the answer that were given out as tokens

    def push(self, token: int, logprob: TokenLogprob | None) -> None:
        self._held.append(ShownToken(self._detokenizer.push(token), logprob))

    def take(self, num_characters: int) -> list[ShownToken]:
        """Those whose text ends within the first `num_characters` of the answer."""
        ready = []
        while self._held and self._num_shown + len(self._held[0].text) <= num_characters:
            self._num_shown += len(self._held[0].text)
            ready.append(self._held.pop(0))
        return ready

    def finish(self, num_characters: int) -> list[ShownToken]:
        """The rest of an answer of `num_characters`; a token that a stop string cut is shown in part."""
        if self._held:
            self._held[-1].text += self._detokenizer.finish()
        ready = self.take(num_characters)
        rest = num_characters - self._num_shown
        if self._held and rest > 0:
            ready.append(ShownToken(self._held[0].text[:rest], self._held[0].logprob))
        return ready


def chat_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a choice of a chat."""
    return {"content": [_chat_entry(token, tokenizer) for token in tokens], "refusal": None}


def _chat_entry(token: ShownToken, tokenizer: Tokenizer) -> dict[str, Any]:
    assert token.logprob is not None
    top = [
        {"token": token_name(each, tokenizer), "logprob": value, "bytes": list(tokenizer.token_bytes(each))}
        for each, value in token.logprob.top
    ]
    return {
        "token": token.text,
        "logprob": token.logprob.logprob,
        "bytes": list(tokenizer.token_bytes(token.logprob.token)),
        "top_logprobs": top,
    }


def text_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """`logprobs` of a choice of a text completion; `offset`: characters of the choice before these tokens."""
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        shown["tokens"].append(token.text)
        shown["text_offset"].append(offset)
        offset += len(token.text)
        if token.logprob is None:
            shown["token_logprobs"].append(None)
            shown["top_logprobs"].append(None)
            continue
        shown["token_logprobs"].append(token.logprob.logprob)
        top: dict[str, float] = {}
        for each, value in (*token.logprob.top, (token.logprob.token, token.logprob.logprob)):
            top.setdefault(token_name(each, tokenizer), value)  # the most probable first
        shown["top_logprobs"].append(top)
    return shown


def prompt_tokens(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer
) -> list[ShownToken]:
    """The tokens of a prompt; special ones are shown by their names."""
    texts = TokenTexts(_Unhidden(tokenizer), continues=True)  # type: ignore[arg-type]
    for token, logprob in zip(prompt, logprobs, strict=True):
        texts.push(token, logprob)
    return texts.finish(1 << 62)


def token_name(token: int, tokenizer: Tokenizer) -> str:
    """A token's text; OpenAI's `bytes:\\xe2` for one that is part of a character."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Unhidden:
    """A tokenizer whose special tokens have text, as they have in a prompt."""

    strips_leading_space = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_bytes = tokenizer.token_bytes

    def is_special(self, token: int) -> bool:
        return False
