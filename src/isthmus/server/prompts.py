"""From what a request says to the token ids the engine gets, within the context it may use.

All of it is slow for long texts and so is called in threads, or in a process apart (text_lanes.py). What
cannot fit is refused, with the numbers; nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isthmus.engine.request import SamplingParams
from isthmus.errors import ContextLengthError, UsageError
from isthmus.server.answers import PLAIN, Answering
from isthmus.server.dialect import Dialect
from isthmus.server.errors import ApiError
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.tools.described import with_tools_in_words

if TYPE_CHECKING:
    from isthmus.tokenizer import ChatTemplate, Segment, Tokenizer


@dataclass(frozen=True)
class Prepared:
    """What the engine gets of a request, and how its answers are read."""

    prompts: list[list[int]]
    answering: Answering = PLAIN


@dataclass(frozen=True)
class Conversation:
    """What a chat template gets: JSON values. `options` are arguments of ChatTemplate.render."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]


@dataclass(frozen=True)
class Prompted:
    """Token ids of each prompt; `inside`: a block of thoughts is open at its end."""

    prompts: list[list[int]]
    inside: bool = False


class Prompts:
    """The text side of one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, dialect: Dialect) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._dialect = dialect
        self._max_token_bytes = max(
            len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)
        )

    def conversation_of(self, chat: ChatRequest) -> Conversation:
        messages = [each.for_template() for each in chat.shown_messages]
        tools: list[dict[str, Any]] | None = [tool.for_template() for tool in chat.callable_tools] or None
        uses_tools = tools or any(each.tool_calls or each.role == "tool" for each in chat.messages)
        if uses_tools and self._dialect.in_words:
            messages, tools = with_tools_in_words(messages, tools, self._dialect.tools), None
        how = {
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continues,
        }
        return Conversation(messages, tools, chat.template_kwargs | how)

    def segments_of(self, conversation: Conversation) -> list[Segment]:
        """The conversation as the model reads it."""
        try:
            return self.template.render(
                conversation.messages, tools=conversation.tools, **conversation.options
            )
        except UsageError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error

    def of_conversation(self, conversation: Conversation, context_tokens: int) -> Prompted:
        segments = self.segments_of(conversation)
        num_bytes = sum(len(segment.text.encode()) for segment in segments)
        self._check_length(num_bytes, context_tokens, "messages")
        with _fitting(context_tokens, "messages"):
            prompt = self.tokenizer.encode_segments(segments, most=context_tokens)
        _check_fits(len(prompt), context_tokens, "messages")
        return Prompted([prompt], self._dialect.begins_inside(segments))

    def of_texts(
        self, texts: Sequence[str | list[int]], context_tokens: int, *, add_special: bool
    ) -> Prompted:
        """Those of a completion: texts, in which their authors may write special tokens, or token ids."""
        prompts = []
        for given in texts:
            if isinstance(given, str):
                self._check_length(len(given.encode()), context_tokens, "prompt")
                with _fitting(context_tokens, "prompt"):
                    ids = self.tokenizer.encode(
                        given, add_special=add_special, parse_special=True, most=context_tokens
                    )
            else:
                ids = given
                check_ids("prompt", ids, self.tokenizer.vocab_size)
            if not ids:
                raise ApiError(400, "prompt: it has no tokens", param="prompt", code="invalid_value")
            _check_fits(len(ids), context_tokens, "prompt")
            prompts.append(ids)
        return Prompted(prompts)

    def _check_length(self, num_bytes: int, context_tokens: int, param: str) -> None:
        """No tokenizer makes fewer tokens than this; it spares megabytes that cannot fit their tokenising."""
        at_least = num_bytes // self._max_token_bytes
        if at_least >= context_tokens:
            _check_fits(at_least, context_tokens, param, f"at least {at_least}")


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """ApiError 400 for token ids that the model has not."""
    check_ids("logit_bias", params.logit_bias, vocab_size)
    check_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def check_ids(param: str, ids: list[int] | tuple[int, ...] | dict[int, float], vocab_size: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        message = f"{param}: token id {wrong} does not exist; the model's are 0 to {vocab_size - 1}"
        raise ApiError(400, message, param=param, code="invalid_value")


@contextmanager
def _fitting(context_tokens: int, param: str) -> Iterator[None]:
    """What the tokenizer has counted and not made is told as what was made and does not fit."""
    try:
        yield
    except ContextLengthError as error:
        _check_fits(error.num_prompt_tokens, context_tokens, param)


def _check_fits(num_tokens: int, context_tokens: int, param: str, count: str | None = None) -> None:
    """ApiError 400 if no token of an answer fits in."""
    if num_tokens >= context_tokens:
        raise ApiError(
            400,
            f"the prompt has {count or num_tokens} tokens; the context of {context_tokens} must hold it and "
            "at least one of the answer: shorten the conversation, or start the server with a larger --ctx",
            param=param,
            code="context_length_exceeded",
            extra={"n_prompt_tokens": num_tokens, "n_ctx": context_tokens},
        )
