"""What a request to `/v1/messages` may say, and the chat that it is."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from isthmus.engine.request import MAX_INT
from isthmus.server.schemas.base import Body, ModelName, StopText
from isthmus.server.schemas.chat import MAX_MESSAGES, MAX_PARTS, Thinking

MAX_TOOLS = 1024

# Known fields that would change the answer and are not acted on -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}


class Block(Body):
    """A part of a message: text, a tool's call or result, thoughts. Other kinds are refused by name."""

    type: str
    text: str = ""
    thinking: str = ""
    id: Annotated[str, Field(max_length=256)] = ""
    name: Annotated[str, Field(max_length=256)] = ""
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(max_length=256)] = ""
    content: Any = None
    is_error: bool | None = None

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("text", "tool_use", "tool_result", "thinking", "redacted_thinking"):
            raise PydanticCustomError("block_type", "blocks of this type are not supported by this server")
        return value


def _as_blocks(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise PydanticCustomError("text_or_blocks", "must be a string or a list of blocks")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Blocks = Annotated[
    list[Block],
    Field(max_length=MAX_PARTS),
    BeforeValidator(_as_blocks),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: _Blocks


class Tool(Body):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Field(max_length=128)] = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(Body):
    """What both endpoints have: all that makes the prompt."""

    model: ModelName = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: _Blocks | None = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def chat_fields(self) -> dict[str, Any]:
        """The same as a body of `/v1/chat/completions`."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            messages += _chat_messages(message)
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
            fields |= _chat_choice(self.tool_choice)
        if self.thinking is not None:
            fields["thinking"] = self.thinking.model_dump()
        return fields


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText] | None, Field(max_length=64)] = None
    temperature: Annotated[float | None, Field(ge=0, le=10)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=MAX_INT)] = None

    def chat_fields(self) -> dict[str, Any]:
        fields = super().chat_fields() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return {name: value for name, value in fields.items() if value is not None}


def _text(blocks: list[Block]) -> str:
    return "\n".join(block.text for block in blocks if block.type == "text")


def _chat_messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """A user's message may hold results of tools; in a chat these are messages of their own, before it."""
    if message.role != "assistant":
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
            for block in message.content
            if block.type == "tool_result"
        ]
        text = _text(message.content)
        has_text = any(block.type == "text" for block in message.content)
        return [*results, *([{"role": message.role, "content": text}] if has_text or not results else [])]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)},
        }
        for block in message.content
        if block.type == "tool_use"
    ]
    fields: dict[str, Any] = {"role": "assistant", "content": _text(message.content)}
    thoughts = "\n".join(block.thinking for block in message.content if block.type == "thinking")
    if thoughts:
        fields["reasoning_content"] = thoughts
    return [fields | ({"tool_calls": calls} if calls else {})]


def _result(block: Block) -> str:
    """A text, or the texts of a list of blocks."""
    if isinstance(block.content, list):
        parts = [each.get("text", "") for each in block.content if isinstance(each, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return block.content if isinstance(block.content, str) else ""


def _chat_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _chat_choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type == "tool":
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name or ""}}}
    return fields | {"tool_choice": {"any": "required"}.get(choice.type, choice.type)}
