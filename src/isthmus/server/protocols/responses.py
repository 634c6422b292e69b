"""An answer as OpenAI's Responses API has it: one object, or its numbered events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from isthmus.server.errors import ApiError
from isthmus.server.generation import Choices
from isthmus.server.protocols.blocks import Added, Block, Closed, Opened, Step
from isthmus.server.schemas.responses import ResponsesRequest
from isthmus.server.sse import named_frame

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class Response:
    """One response: what it was asked, and the objects that tell of it."""

    def __init__(self, choices: Choices, body: ResponsesRequest, model: str) -> None:
        self._choices = choices
        self._body = body
        self._model = model
        self._created_at = int(time.time())
        self._num_events = 0

    def object(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """The whole response."""
        statuses = ["completed"] * len(blocks)
        if blocks:
            statuses[-1] = self._last_status
        output = [self._item(*each) for each in zip(blocks, statuses, strict=True)]
        return self._object(output, self._choices.generations[0].finish_reason)

    def _object(self, output: list[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        """finish_reason: None while it goes on."""
        body = self._body
        ended, cut = finish_reason is not None, finish_reason == "length"
        return {
            "id": self._choices.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if ended else None,
            "status": "incomplete" if cut else "completed" if ended else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(mode="json") for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": None,
            "metadata": body.metadata or {},
        }

    def begin(self) -> bytes:
        response = self._object([], None)  # a fast answer may have ended already: that is for `end` to say
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def step(self, step: Step, *, is_last: bool = False) -> bytes:
        """What one step of a block is in events; `is_last`: the last step of all."""
        block = step.block
        if isinstance(step, Opened):
            return self._opened(block)
        if isinstance(step, Added):
            return self._event(_delta_event(block), **self._place(block), delta=step.text, **_logprobs(block))
        assert isinstance(step, Closed)
        return self._closed(block, self._last_status if is_last else "completed")

    def end(self, blocks: Sequence[Block]) -> bytes:
        response = self.object(blocks)
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed: the protocol's own event."""
        about = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", **about, error=error.body["error"])

    def _opened(self, block: Block) -> bytes:
        item = self._item(Block(block.index, block.kind, call=block.call), "in_progress")
        raw = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return raw
        part = _part(Block(block.index, block.kind))
        return raw + self._event("response.content_part.added", **self._place(block), part=part)

    @property
    def _last_status(self) -> str:
        """Of the last item: nobody should act on a call of which a part is missing."""
        return "incomplete" if self._choices.generations[0].finish_reason == "length" else "completed"

    def _closed(self, block: Block, status: str) -> bytes:
        place = self._place(block)
        if block.kind == "call":
            assert block.call is not None
            raw = self._event(
                "response.function_call_arguments.done", **place, name=block.call.name, arguments=block.text
            )
        else:
            name = _delta_event(block).replace(".delta", ".done")
            raw = self._event(name, **place, text=block.text, **_logprobs(block))
            raw += self._event("response.content_part.done", **place, part=_part(block))
        item = self._item(block, status)
        return raw + self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        head = {"type": kind, "sequence_number": self._num_events}
        self._num_events += 1
        return named_frame(kind, head | fields)

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else place | {"content_index": 0}

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._choices.id.partition('_')[2]}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            assert block.call is not None
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return head | {"type": "function_call"} | call
        content = [] if status == "in_progress" else [_part(block)]
        if block.kind == "reasoning":
            return head | {"type": "reasoning", "summary": [], "content": content}
        return head | {"type": "message", "role": "assistant", "content": content}

    def _usage(self) -> dict[str, Any]:
        timing = self._choices.generations[0].timing
        return {
            "input_tokens": timing.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": timing.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": timing.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._choices.generations[0].num_reasoning_tokens},
            "total_tokens": timing.num_prompt_tokens + timing.num_output_tokens,
        }


def _delta_event(block: Block) -> str:
    names = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
    return f"response.{names[block.kind]}.delta"


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}
