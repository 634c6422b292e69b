"""An answer as Anthropic's Messages API has it: one object, or its sequence of named events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from isthmus.server.generation import Choices
from isthmus.server.protocols.blocks import Added, Block, Closed, Opened, Step, whole_blocks
from isthmus.server.sse import named_frame

# What `tool_use` holds if the model's arguments are no JSON object: clients need one.
_NO_INPUT: dict[str, Any] = {}


def message(choices: Choices, model: str, blocks: Iterable[Block] = ()) -> dict[str, Any]:
    """The message: whole with its `blocks`, or as a stream begins, without any."""
    generation = choices.generations[0]
    return {
        "id": choices.id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [_content(block) for block in blocks],
        "stop_reason": stop_reason(choices),
        "stop_sequence": generation.stop_text,
        "usage": usage(choices),
    }


def whole(choices: Choices, model: str, events: list[Any]) -> dict[str, Any]:
    return message(choices, model, whole_blocks(events))


def usage(choices: Choices) -> dict[str, int]:
    """Anthropic counts what was found in the cache apart from the other tokens of the prompt."""
    timing = choices.generations[0].timing
    return {
        "input_tokens": timing.num_prompt_tokens - timing.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": timing.num_cached_tokens,
        "output_tokens": timing.num_output_tokens,
    }


def stop_reason(choices: Choices) -> str | None:
    """None while the answer goes on."""
    generation = choices.generations[0]
    if generation.stop_text is not None:
        return "stop_sequence"
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return reasons[generation.finish_reason] if generation.finish_reason is not None else None


def begin(choices: Choices, model: str) -> bytes:
    # A fast answer may have ended already: that is for `end` to say.
    begun = message(choices, model) | {"stop_reason": None, "stop_sequence": None}
    return _event("message_start", message=begun)


def step(step: Step) -> bytes:
    """One event of a block."""
    index = step.block.index
    if isinstance(step, Opened):
        empty = Block(index, step.block.kind, call=step.block.call)
        return _event("content_block_start", index=index, content_block=_content(empty))
    if isinstance(step, Added):
        return _event("content_block_delta", index=index, delta=_delta(step))
    assert isinstance(step, Closed)
    return _event("content_block_stop", index=index)


def end(choices: Choices) -> bytes:
    delta = {"stop_reason": stop_reason(choices), "stop_sequence": choices.generations[0].stop_text}
    return _event("message_delta", delta=delta, usage=usage(choices)) + _event("message_stop")


def _delta(step: Added) -> dict[str, Any]:
    if step.block.kind == "text":
        return {"type": "text_delta", "text": step.text}
    if step.block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": step.text}
    return {"type": "input_json_delta", "partial_json": step.text}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    assert block.call is not None
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": _object(block.text)}


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return _NO_INPUT
    return value if isinstance(value, dict) else _NO_INPUT


def _event(kind: str, **fields: Any) -> bytes:
    return named_frame(kind, {"type": kind} | fields)
