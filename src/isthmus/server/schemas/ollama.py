"""What requests to Ollama's `/api/chat`, `/api/generate` and `/api/show` may say, and the chat that they are.

`num_ctx` and `keep_alive` are ignored: one context is loaded, for as long as the server lives, and nothing is
ever cut to fit.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, WithJsonSchema

from isthmus.engine.request import MAX_INT, MAX_SEED
from isthmus.server.schemas.base import Body, Stop
from isthmus.server.schemas.chat import MAX_MESSAGES

# Known fields that would change the answer and are not acted on -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
}

_Name = Annotated[str, Field(max_length=4096)]
_Number = Annotated[float | None, Field(ge=-2, le=2)]


def _none_if_minus_one(seed: Any) -> Any:
    """Ollama's clients send -1 for "any"."""
    return None if seed == -1 and not isinstance(seed, bool) else seed


class Options(Body):
    num_predict: Annotated[int | None, Field(ge=-2, le=MAX_INT)] = None  # below 1: until the end
    temperature: Annotated[float | None, Field(ge=0, le=10)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_INT)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repeat_penalty: Annotated[float | None, Field(ge=0.01, le=10)] = None
    presence_penalty: _Number = None
    frequency_penalty: _Number = None
    seed: Annotated[
        int | None,
        Field(ge=0, le=MAX_SEED),
        BeforeValidator(_none_if_minus_one),
        WithJsonSchema({"type": "integer", "minimum": -1}),
    ] = None
    stop: Stop | None = None

    def chat_fields(self) -> dict[str, Any]:
        fields = self.model_dump(mode="python")
        limit = fields.pop("num_predict")
        if limit is not None and limit > 0:
            fields["max_tokens"] = limit
        return fields


class _Ask(Body):
    model: _Name
    stream: bool | None = None  # true if not said
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Annotated[str, Field(max_length=16)] | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model}
        if self.options is not None:
            fields |= self.options.chat_fields()
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            schema = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if isinstance(self.think, bool):
            fields["enable_thinking"] = self.think
        elif self.think is not None:
            fields["reasoning_effort"] = self.think
        return {name: value for name, value in fields.items() if value is not None}


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Annotated[list[Any] | None, Field(max_length=0)] = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: Annotated[str | None, Field(max_length=256)] = None

    def chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            fields["reasoning_content"] = self.thinking
        if self.tool_calls:
            fields["tool_calls"] = [_chat_call(call, index) for index, call in enumerate(self.tool_calls)]
        if self.role == "tool" and self.tool_name:
            fields["name"] = self.tool_name
        return fields


class OllamaChatRequest(_Ask):
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)]
    tools: Annotated[list[dict[str, Any]] | None, Field(max_length=1024)] = None

    def chat_fields(self) -> dict[str, Any]:
        fields = super().chat_fields() | {"messages": [each.chat_fields() for each in self.messages]}
        return fields | ({"tools": self.tools} if self.tools else {})


class GenerateRequest(_Ask):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None

    def chat_fields(self) -> dict[str, Any]:
        """A turn of a chat; with `raw` a text to be continued as it is."""
        if self.raw:
            return super().chat_fields() | {"prompt": self.prompt}
        system = [{"role": "system", "content": self.system}] if self.system else []
        return super().chat_fields() | {"messages": [*system, {"role": "user", "content": self.prompt}]}


class ShowRequest(Body):
    model: Annotated[_Name, Field(validation_alias=AliasChoices("model", "name"))]


def _chat_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    """Ollama's calls have arguments as an object, and mostly no id."""
    given = call.get("function")
    function: dict[str, Any] = given if isinstance(given, dict) else {}
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    named = {"name": function.get("name", ""), "arguments": arguments}
    return {"id": call.get("id") or f"call_{index}", "type": "function", "function": named}
