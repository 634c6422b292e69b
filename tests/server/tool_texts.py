"""Answers with tool calls as the models write them, by dialect: what templates and model cards show."""

# ruff: noqa: RUF001 (DeepSeek writes its markers with a fullwidth bar)

import json
from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]
Call = tuple[str, Arguments]

_D = {
    name: f"<｜{name.replace(' ', '▁')}｜>"
    for name in (
        "tool calls begin",
        "tool calls end",
        "tool call begin",
        "tool call end",
        "tool sep",
    )
}


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def hermes(calls: list[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {dumps(name)}, "arguments": {dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def qwen3_coder(calls: list[Call]) -> str:
    def parameters(arguments: Arguments) -> str:
        return "".join(
            f"<parameter={key}>\n{_as_text(value)}\n</parameter>\n" for key, value in arguments.items()
        )

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{parameters(arguments)}</function>\n</tool_call>"
        for name, arguments in calls
    )


def deepseek_v3(calls: list[Call]) -> str:
    texts = [
        f"{_D['tool call begin']}function{_D['tool sep']}{name}\n```json\n{dumps(arguments)}\n```"
        f"{_D['tool call end']}"
        for name, arguments in calls
    ]
    return _D["tool calls begin"] + "\n".join(texts) + _D["tool calls end"]


def deepseek_v31(calls: list[Call]) -> str:
    texts = [
        f"{_D['tool call begin']}{name}{_D['tool sep']}{dumps(arguments)}{_D['tool call end']}"
        for name, arguments in calls
    ]
    return _D["tool calls begin"] + "".join(texts) + _D["tool calls end"]


def kimi_k2(calls: list[Call]) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(arguments)}"
        "<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def glm45(calls: list[Call]) -> str:
    def elements(arguments: Arguments) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_as_text(value)}</arg_value>\n"
            for key, value in arguments.items()
        )

    return "\n".join(f"<tool_call>{name}\n{elements(arguments)}</tool_call>" for name, arguments in calls)


def minimax_m2(calls: list[Call]) -> str:
    def parameters(arguments: Arguments) -> str:
        return "".join(
            f'<parameter name="{key}">{_as_text(value)}</parameter>\n' for key, value in arguments.items()
        )

    invokes = [f'<invoke name="{name}">\n{parameters(arguments)}</invoke>\n' for name, arguments in calls]
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS] " + dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral_v11(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def llama3_json(calls: list[Call]) -> str:
    return "; ".join(dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def harmony(calls: list[Call]) -> str:
    """gpt-oss makes one call a turn; a second is written as the next message would be."""
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


# dialect -> (name of its parser, how it writes calls)
WRITERS: dict[str, tuple[str, Callable[[list[Call]], str]]] = {
    "hermes": ("hermes", hermes),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v31", deepseek_v31),
    "kimi_k2": ("kimi_k2", kimi_k2),
    "glm45": ("glm45", glm45),
    "minimax_m2": ("minimax_m2", minimax_m2),
    "mistral": ("mistral", mistral),
    "mistral_v11": ("mistral", mistral_v11),
    "llama3_json": ("llama3_json", llama3_json),
    "harmony": ("harmony", harmony),
}

# Dialects whose texts may follow content, and those whose arguments are JSON and so can hold any text.
AFTER_CONTENT = [name for name in WRITERS if name not in ("llama3_json", "harmony")]
JSON_ARGUMENTS = [name for name in WRITERS if name not in ("qwen3_coder", "glm45", "minimax_m2")]
