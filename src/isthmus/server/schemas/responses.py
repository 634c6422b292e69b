"""What a request to `/v1/responses` may say, and the chat that it is. Stateless: nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from isthmus.engine.request import MAX_INT
from isthmus.server.schemas.base import Body, ModelName
from isthmus.server.schemas.chat import MAX_MESSAGES, MAX_PARTS

MAX_TOOLS = 1024

# Known fields that would change the answer and are not acted on -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": ("",),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class Part(Body):
    type: str
    text: str = ""
    refusal: str = ""

    @field_validator("type")
    @classmethod
    def _text_only(cls, value: str) -> str:
        if value not in _TEXT_PARTS:
            raise PydanticCustomError("part_type", "parts of this type are not supported by this server")
        return value


def _as_parts(content: Any) -> Any:
    if content is None:
        return []
    if not isinstance(content, str | list):
        raise PydanticCustomError("text_or_parts", "must be a string or a list of parts")
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


_Parts = Annotated[
    list[Part],
    Field(max_length=MAX_PARTS),
    BeforeValidator(_as_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class Item(Body):
    """A message, a tool's call, its result, or thoughts. Other kinds are refused by name."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Parts = Field(default_factory=list)
    summary: _Parts = Field(default_factory=list)
    call_id: Annotated[str, Field(max_length=256)] = ""
    name: Annotated[str, Field(max_length=256)] = ""
    arguments: str = ""
    output: _Parts = Field(default_factory=list)

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("message", "function_call", "function_call_output", "reasoning"):
            raise PydanticCustomError("item_type", "items of this type are not supported by this server")
        return value

    @property
    def text(self) -> str:
        return _text(self.content or self.summary)


def _as_items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("text_or_items", "must be a string or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Items = Annotated[
    list[Item],
    Field(min_length=1, max_length=MAX_MESSAGES),
    BeforeValidator(_as_items),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]}
    ),
]


class Tool(Body):
    type: str
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("type")
    @classmethod
    def _functions_only(cls, value: str) -> str:
        if value != "function":
            raise PydanticCustomError("tool_type", "only tools of type 'function' are supported")
        return value


class Reasoning(Body):
    effort: Annotated[str | None, Field(max_length=16)] = None


class TextFormat(Body):
    format: dict[str, Any] | None = None


class ResponsesRequest(Body):
    model: ModelName = None
    input: _Items
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_INT)] = None
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0, le=10)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextFormat | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None

    def chat_fields(self) -> dict[str, Any]:
        """The same as a body of `/v1/chat/completions`."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            _append(messages, item)
        effort = self.reasoning.effort if self.reasoning is not None else None
        fields = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "reasoning_effort": effort,
            "response_format": self._response_format(),
            "add_generation_prompt": True,  # what follows is an item of its own
        }
        if self.tools:
            fields |= {
                "tools": [_chat_tool(tool) for tool in self.tools],
                "tool_choice": self._tool_choice(),
                "parallel_tool_calls": self.parallel_tool_calls,
            }
        return {name: value for name, value in fields.items() if value is not None}

    def _response_format(self) -> dict[str, Any] | None:
        """`{type: json_schema, name, schema, strict}` is one level deeper in a chat."""
        given = self.text.format if self.text is not None else None
        if given is None or given.get("type") != "json_schema":
            return given
        schema = {name: value for name, value in given.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}

    def _tool_choice(self) -> Any:
        if isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "function":
            return {"type": "function", "function": {"name": self.tool_choice.get("name", "")}}
        return self.tool_choice


def _text(parts: list[Part]) -> str:
    return "\n".join(part.text or part.refusal for part in parts)


def _append(messages: list[dict[str, Any]], item: Item) -> None:
    """Thoughts, text and calls of one turn are one message in a chat."""
    if item.type == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        return
    if item.type == "message" and item.role != "assistant":
        messages.append({"role": item.role or "user", "content": item.text})
        return
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    # A second text begins another message; what came before calls or thoughts belongs to the same turn.
    if last is None or (item.type == "message" and last["content"]) or item.type == "reasoning":
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if item.type == "message":
        last["content"] = item.text
    elif item.type == "reasoning":
        last["reasoning_content"] = item.text
    else:
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)


def _chat_tool(tool: Tool) -> dict[str, Any]:
    fields = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    known = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name} | known}
