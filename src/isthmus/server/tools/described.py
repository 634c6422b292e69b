"""Tools for a model whose chat template does not name them: told of in words.

A template that writes earlier calls has a syntax of its own for them. With one that does not, calls are
written as Hermes models do, which others follow more or less; a grammar (tool_choice, strict) makes sure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = (
    "You may call one or more functions to assist with the user query.\n\n"
    "The functions are described within <tools></tools>:\n<tools>\n"
)
_SYNTAX = (
    "\n\nFor each function call return a JSON object with its name and arguments within "
    '<tool_call></tool_call>:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


def with_tools_in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, dialect: str | None
) -> list[dict[str, Any]]:
    """Tools in the system message; in Hermes earlier calls as the assistant's text, results as the user's.

    dialect: the model's parser of tool calls.
    """
    in_hermes = dialect == "hermes"
    result: list[dict[str, Any]] = []
    for message in messages:
        after_result = result and message["role"] == "tool" and result[-1]["role"] == "user"
        told = _in_hermes(message) if in_hermes else dict(message)
        if after_result and in_hermes:  # results of parallel calls are one message
            result[-1]["content"] += "\n" + told["content"]
        else:
            result.append(told)
    if tools:
        words = _WORDS + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + "\n</tools>"
        words += _SYNTAX if in_hermes else ""
        if result and result[0]["role"] == "system":
            result[0]["content"] = f"{words}\n\n{result[0]['content']}"
        else:
            result.insert(0, {"role": "system", "content": words})
    return result


def _in_hermes(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"] or ""
    told = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return told | {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = "\n".join(map(_call, message.get("tool_calls") or ()))
    return told | {"content": f"{content}\n{calls}" if content and calls else content or calls}


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return (
        f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {text or "{}"}}}\n</tool_call>'
    )
