"""What an answer has cost, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from isthmus.server.generation import Choices


def usage_of(choices: Choices, num_per_prompt: int = 1) -> dict[str, Any]:
    """Tokens of all choices; a prompt that `num_per_prompt` of them share counts once."""
    timings = [each.timing for each in choices.generations]
    prompt = sum(each.num_prompt_tokens for each in timings[::num_per_prompt])
    cached = sum(each.num_cached_tokens for each in timings[::num_per_prompt])
    output = sum(each.num_output_tokens for each in timings)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def totals_of(choices: Choices, num_per_prompt: int = 1) -> dict[str, Any]:
    """What stands beside the choices of an answer, or in the last chunk of a stream."""
    totals: dict[str, Any] = {"usage": usage_of(choices, num_per_prompt)}
    if len(choices.generations) == 1:
        totals["timings"] = choices.generations[0].timing.as_timings()
    return totals
