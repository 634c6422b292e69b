"""What a request to `/v1/chat/completions` may say: every number, list and string with its bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from isthmus.engine.request import MAX_LOGPROBS
from isthmus.server.schemas.base import MAX_NAME_CHARACTERS, Body, Sampling, TokenLimit
from isthmus.server.schemas.tools import MAX_CALLS, ToolCall, ToolFields

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
MAX_TEMPLATE_KWARGS = 16

# Arguments of a template that are not the caller's to set: they decide what is rendered, not how.
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
    | {"bos_token", "eos_token", "tokenize"}
)

# What templates call their switch: Qwen's and GLM's, DeepSeek's and Kimi's.
_THINKS = ("enable_thinking", "thinking")


class TextPart(Body):
    type: str
    text: str = ""

    @field_validator("type")
    @classmethod
    def _text_only(cls, value: str) -> str:
        if value != "text":
            raise PydanticCustomError("part_type", "only parts of type 'text' are supported by this server")
        return value


def _as_parts(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise PydanticCustomError("text_or_parts", "must be a string or a list of parts")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Content = Annotated[
    list[TextPart],
    Field(max_length=MAX_PARTS),
    BeforeValidator(_as_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Annotated[str | None, Field(max_length=MAX_NAME_CHARACTERS)] = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_CALLS)] = None
    tool_call_id: Annotated[str | None, Field(max_length=MAX_NAME_CHARACTERS)] = None
    # What the model thought in an earlier turn; both names are in use among servers and clients.
    reasoning_content: Annotated[
        str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
    ] = None
    audio: dict[str, Any] | None = None
    content: Annotated[_Content | None, Field(validate_default=True)] = None

    @field_validator("tool_calls")
    @classmethod
    def _from_the_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role") != "assistant":
            raise PydanticCustomError("wrong_role", "only a message of the assistant may have tool calls")
        return value or None

    @field_validator("content", mode="before")
    @classmethod
    def _null_beside_calls(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "only a message with tool_calls may leave it out")
        return value

    @field_validator("audio")
    @classmethod
    def _none_yet(cls, value: Any) -> Any:
        if value:
            raise PydanticCustomError("unsupported", "not supported by this server yet")
        return None

    @property
    def text(self) -> str | None:
        """Its parts joined by line ends; None for none."""
        return None if self.content is None else "\n".join(part.text for part in self.content)

    @property
    def may_go_on(self) -> bool:
        """Whether an answer can continue it."""
        return self.role == "assistant" and not self.tool_calls

    @property
    def says_something(self) -> bool:
        return bool(self.text or self.reasoning_content)

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content is one string."""
        role = "system" if self.role == "developer" else self.role
        content = self.text
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


class Thinking(Body):
    """Whether the model thinks, as Anthropic, DeepSeek and GLM have it; a budget is not held."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]


class ChatRequest(Sampling, ToolFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenLimit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    # Variables of the chat template: `{"enable_thinking": false}` and the like.
    chat_template_kwargs: Annotated[
        dict[str, bool | int | Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None] | None,
        Field(max_length=MAX_TEMPLATE_KWARGS),
    ] = None
    reasoning_effort: Annotated[str | None, Field(max_length=16)] = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None  # Qwen's word for the same

    # How the prompt ends: with the head of a new answer, or open inside the last message (see `continues`).
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @field_validator("messages")
    @classmethod
    def _results_have_calls(cls, value: list[Message]) -> list[Message]:
        ids: set[str | None] = set()
        for index, message in enumerate(value):
            ids |= {call.id for call in message.tool_calls or ()}
            if message.role != "tool":
                continue
            if not ids:
                text = "the tool's result at {index} follows no message with tool_calls"
                raise PydanticCustomError("no_call", text, {"index": index})
            if message.tool_call_id is not None and None not in ids and message.tool_call_id not in ids:
                text = "the tool_call_id at {index} is that of no call before it"
                raise PydanticCustomError("no_call", text, {"index": index})
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_names(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for key in value or {}:
            if key in _RESERVED_KWARGS or not key.isidentifier() or key.startswith("_"):
                raise PydanticCustomError("kwarg_name", "it must not set reserved or private names")
        return value

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("dependent", "needs 'logprobs': true", {"param": "top_logprobs"})
        return self

    @model_validator(mode="after")
    def _can_continue(self) -> ChatRequest:
        if not self.continue_final_message:
            return self
        why = None
        if self.add_generation_prompt:
            why = "and add_generation_prompt exclude each other"
        elif not self.messages[-1].may_go_on:
            why = "needs a last message of the assistant, without tool_calls"
        elif self.held is not None:
            why = f"cannot go together with {self.held}, which is held by a whole answer"
        if why is not None:
            raise PydanticCustomError("dependent", "{why}", {"why": why, "param": "continue_final_message"})
        return self

    @property
    def continues(self) -> bool:
        """Whether the answer goes on from the end of the last message.

        Where nothing is said of that, a text of the assistant at the end is one to go on from, as it is for
        llama-server and Ollama; not if a whole answer is held to a form.
        """
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = self.messages[-1]
        return (
            self.add_generation_prompt is None
            and self.held is None
            and last.may_go_on
            and last.says_something
        )

    @property
    def shown_messages(self) -> list[Message]:
        """Without an empty one of the assistant at the end, which is the answer to come."""
        last = self.messages[-1]
        says_how = self.continue_final_message is not None or self.add_generation_prompt is not None
        if says_how or not last.may_go_on or last.says_something:
            return self.messages
        return self.messages[:-1] or self.messages

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The newer name wins, as at OpenAI."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def template_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = dict(self.chat_template_kwargs or {})
        thinks = self.enable_thinking
        if thinks is None and self.thinking is not None:
            thinks = self.thinking.type != "disabled"
        if thinks is not None:
            for name in _THINKS:
                kwargs.setdefault(name, thinks)
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return kwargs
