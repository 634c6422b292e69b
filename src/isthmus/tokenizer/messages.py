"""Chat messages as a client sends them (OpenAI's shape), checked and brought into the shape templates expect.

Every error is a UsageError that names the message and the key, so that a server can answer 400 with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.errors import UsageError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = dict[str, Any]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Fresh dicts: content a str, text parts, or None beside tool calls; a call's arguments an object."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise UsageError("messages is empty; a chat needs at least one message")
    checked: list[Message] = []
    called = False
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        one = _check_message(message, where)
        if one["role"] == "tool":
            _check_tool_result(one, where, called, call_ids)
        for call in one.get("tool_calls") or ():
            called = True
            call_ids.update([call["id"]] if isinstance(call.get("id"), str) else [])
        checked.append(one)
    return checked


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Message] | None:
    """None for none; each must be {"type": "function", "function": {"name": ...}}."""
    if not tools:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise UsageError(f"tools must be a list of tools, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError(f"tools[{index}].function.name is missing; a tool is a function with a name")
    return [dict(tool) for tool in tools]


def check_continued(message: Message) -> None:
    """UsageError unless an answer can go on from the end of this last message, one of `check_messages`."""
    if message["role"] != "assistant":
        raise UsageError(
            f"only a message of the assistant can be continued, the last is from {message['role']!r}"
        )
    if message.get("tool_calls"):
        raise UsageError("a message with tool_calls cannot be continued")
    if not isinstance(message["content"], str) and not message["content"]:
        raise UsageError("the last message has no text to continue")


def _check_message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise UsageError(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    checked = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in checked:
        checked["tool_calls"] = _check_calls(checked["tool_calls"], role, f"{where}.tool_calls")
    if "reasoning" in checked:
        checked.setdefault("reasoning_content", checked["reasoning"])
    checked["content"] = _check_content(message.get("content"), bool(checked.get("tool_calls")), where)
    return checked


def _check_content(content: Any, has_calls: bool, where: str) -> str | list[dict[str, str]] | None:
    if isinstance(content, str) or (content is None and has_calls):
        return content
    if content is None:
        raise UsageError(
            f"{where}.content is null; only an assistant message with tool_calls may leave it out"
        )
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(f"{where}.content must be a text or a list of parts, got {type(content).__name__}")
    return [_check_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]


def _check_part(part: Any, where: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise UsageError(f"{where} is of type {kind!r}; only 'text' parts are supported")
    if not isinstance(part.get("text"), str):
        raise UsageError(f"{where}.text must be a text, got {type(part.get('text')).__name__}")
    return {"type": "text", "text": part["text"]}


def _check_calls(calls: Any, role: str, where: str) -> list[Message]:
    if role != "assistant":
        raise UsageError(f"{where}: only an assistant message may have tool_calls, this is from {role!r}")
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise UsageError(f"{where} must be a list, got {type(calls).__name__}")
    return [_check_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _check_call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where}.function.name is missing; a call names the function that it calls")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}.function.arguments is no JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{where}.function.arguments must be a JSON object, got {type(arguments).__name__}")
    return {"type": "function", **call, "function": {**function, "arguments": dict(arguments)}}


def _check_tool_result(message: Message, where: str, called: bool, call_ids: set[str]) -> None:
    if not called:
        raise UsageError(f"{where} is a tool's result, but no assistant message before it has tool_calls")
    answered = message.get("tool_call_id")
    if answered is not None and call_ids and answered not in call_ids:
        raise UsageError(f"{where}.tool_call_id is {answered!r}, which no tool call before it has as id")
