"""What a request to `/v1/chat/completions` may say: every number, list and string with its bounds.

The bounds that the engine also holds are imported from it. Strict: "7" is not a number here and 1.5 not a
count. Unknown fields are ignored; those that would change the answer are refused before (unsupported.py).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from isthmus.engine.request import (
    MAX_INT,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
MAX_NAME_CHARACTERS = 256
MAX_TEMPLATE_KWARGS = 16

# Arguments of a template that are not the caller's to set: they decide what is rendered, not how.
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "tokenize"}
)

_TOKEN_ID = re.compile(r"[0-9]{1,8}")


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class TextPart(_Model):
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


def _as_list(stop: Any) -> Any:
    if not isinstance(stop, str | list):
        raise PydanticCustomError("text_or_list", "must be a string or a list of strings")
    return [stop] if isinstance(stop, str) else stop


_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Stop = Annotated[
    list[_StopText],
    Field(max_length=MAX_STOP_STRINGS),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}}]}
    ),
]
_Content = Annotated[
    list[TextPart],
    Field(max_length=MAX_PARTS),
    BeforeValidator(_as_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
_Penalty = Annotated[float | None, Field(ge=-2, le=2)]


class Message(_Model):
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


class StreamOptions(_Model):
    include_usage: bool | None = None


class ChatRequest(_Model):
    model: Annotated[str | None, Field(max_length=4096)] = None  # None: the one that is served
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_INT)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=MAX_INT)] = None
    stop: _Stop | None = None
    stop_token_ids: Annotated[list[_TokenId] | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None

    temperature: Annotated[float | None, Field(ge=0, le=10)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_INT)] = None  # 0 and -1: off
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    repetition_penalty: Annotated[
        float | None,
        Field(gt=0, le=10, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")),
    ] = None
    logit_bias: Annotated[dict[str, _Bias] | None, Field(max_length=MAX_LOGIT_BIAS)] = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None

    # Variables of the chat template: `{"enable_thinking": false}` and the like.
    chat_template_kwargs: Annotated[
        dict[str, bool | int | Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None] | None,
        Field(max_length=MAX_TEMPLATE_KWARGS),
    ] = None
    reasoning_effort: Annotated[str | None, Field(max_length=16)] = None

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not _TOKEN_ID.fullmatch(key):
                raise PydanticCustomError(
                    "token_id", "its keys must be token ids, that is whole numbers from 0"
                )
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_names(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for key in value or {}:
            if key in _RESERVED_KWARGS or not key.isidentifier() or key.startswith("_"):
                raise PydanticCustomError("kwarg_name", "it must not set reserved or private names")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def template_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return kwargs

    def sampling_params(self) -> SamplingParams:
        """What was asked for, over the engine's defaults; null means default."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": max(self.top_k, 0) if self.top_k is not None else None,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": {int(key): value for key, value in (self.logit_bias or {}).items()},
            "seed": self.seed,
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "max_tokens": limit,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
