"""An answer as Ollama has it: lines of JSON, the last with counts and durations in nanoseconds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from isthmus.engine.request import ModelInfo
from isthmus.server.events import Content, Event, Reasoning
from isthmus.server.generation import Choices
from isthmus.server.protocols.blocks import Block, whole_blocks

# The version of Ollama whose protocol this is; clients refuse to speak to old ones.
VERSION = "0.12.6"


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def chat_line(model: str, events: Iterable[Event], calls: Iterable[Block] = ()) -> dict[str, Any]:
    """A part of an answer to `/api/chat`; calls come whole, with their arguments as an object."""
    message: dict[str, Any] = {"role": "assistant", "content": _text(events, Content)}
    thinking = _text(events, Reasoning)
    if thinking:
        message["thinking"] = thinking
    shown = [_call(block) for block in calls]
    if shown:
        message["tool_calls"] = shown
    return {"model": model, "created_at": now(), "message": message, "done": False}


def generate_line(model: str, events: Iterable[Event]) -> dict[str, Any]:
    """A part of an answer to `/api/generate`."""
    line = {"model": model, "created_at": now(), "response": _text(events, Content), "done": False}
    thinking = _text(events, Reasoning)
    return line | ({"thinking": thinking} if thinking else {})


def end(choices: Choices) -> dict[str, Any]:
    """What the last line says beside its part."""
    generation = choices.generations[0]
    timing = generation.timing
    prompt_ns, output_ns = round(timing.first_token_s * 1e9), round(timing.decode_s * 1e9)
    return {
        "done": True,
        "done_reason": "length" if generation.finish_reason == "length" else "stop",
        "total_duration": prompt_ns + output_ns,
        "load_duration": 0,
        "prompt_eval_count": timing.num_prompt_tokens,
        "prompt_eval_duration": prompt_ns,
        "eval_count": timing.num_output_tokens,
        "eval_duration": output_ns,
    }


def loaded() -> dict[str, Any]:
    """The answer to a request without a prompt, by which clients have a model loaded."""
    return {"done": True, "done_reason": "load"}


def calls_of(events: Iterable[Event]) -> list[Block]:
    return [block for block in whole_blocks(events) if block.kind == "call"]


def listed(name: str, info: ModelInfo | None, created: int) -> dict[str, Any]:
    """A model in `/api/tags`. There is no file of Ollama's, so the digest is none."""
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "size": info.weight_bytes if info else 0,
        "digest": "",
        "details": details(info),
    }


def details(info: ModelInfo | None) -> dict[str, Any]:
    family = info.architecture if info else ""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _text(events: Iterable[Event], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _call(block: Block) -> dict[str, Any]:
    assert block.call is not None
    try:
        arguments = json.loads(block.text)
    except ValueError:
        arguments = {}
    return {"id": block.call.id, "function": {"name": block.call.name, "arguments": arguments}}
