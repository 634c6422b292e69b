"""What a request to `/v1/chat/completions` may say: every number, list and string with its bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from isthmus.engine.request import MAX_LOGPROBS
from isthmus.server.schemas.base import MAX_NAME_CHARACTERS, Body, Sampling, TokenLimit

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
MAX_TEMPLATE_KWARGS = 16

# Arguments of a template that are not the caller's to set: they decide what is rendered, not how.
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "tokenize"}
)


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
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    name: Annotated[str | None, Field(max_length=MAX_NAME_CHARACTERS)] = None
    # What the model thought in an earlier turn; both names are in use among servers and clients.
    reasoning_content: Annotated[
        str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
    ] = None
    tool_calls: list[Any] | None = None
    audio: dict[str, Any] | None = None

    @field_validator("tool_calls", "audio")
    @classmethod
    def _none_yet(cls, value: Any) -> Any:
        if value:
            raise PydanticCustomError("unsupported", "not supported by this server yet")
        return None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content is one string (parts are joined by line ends)."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": "\n".join(part.text for part in self.content)}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


class ChatRequest(Sampling):
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
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return kwargs
