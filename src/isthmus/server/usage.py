"""What an answer has cost, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from isthmus.server.generation import Choices


def usage_of(choices: Choices, num_per_prompt: int = 1) -> dict[str, Any]:
    """Tokens of all choices; a prompt that `num_per_prompt` of them share counts once."""
    prompt = sum(each.num_prompt_tokens for each in choices.generations[::num_per_prompt])
    output = sum(each.num_output_tokens for each in choices.generations)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
