"""What a request to `/v1/completions` may say."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from isthmus.engine.request import MAX_INT, MAX_LOGPROBS
from isthmus.server.schemas.base import Sampling, TokenId

MAX_PROMPTS = 1024
MAX_REQUESTS = 1024  # prompts times n

# OpenAI's default of this endpoint, which clients know: an answer does not run on by itself.
DEFAULT_MAX_TOKENS = 16


def _as_prompts(prompt: Any) -> Any:
    """A text, ids, a list of texts or a list of ids -> a list of texts or ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise PydanticCustomError("prompt", "must be a text, token ids, or a list of either, and not empty")
    kinds = set(map(type, prompt))
    prompts = [prompt] if kinds == {int} else prompt
    if kinds in ({int}, {list}) and not all(map(_are_ids, prompts)):
        raise PydanticCustomError("prompt", "token ids must be whole numbers from 0, and a list not empty")
    if kinds in ({str}, {int}, {list}):
        return prompts
    raise PydanticCustomError("prompt", "must be all texts or all lists of token ids, not a mixture")


def _are_ids(ids: list[Any]) -> bool:
    return set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) <= MAX_INT


_Ids = Annotated[list[TokenId], Field(min_length=1)]
_Prompts = Annotated[
    list[str | _Ids],
    Field(max_length=MAX_PROMPTS),
    BeforeValidator(_as_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
            ]
        }
    ),
]


class CompletionRequest(Sampling):
    prompt: _Prompts
    max_tokens: Annotated[int | None, Field(ge=0, le=MAX_INT)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    add_special_tokens: bool | None = None  # vLLM's: whether a text gets the model's BOS; default true

    @model_validator(mode="after")
    def _checked(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("dependent", "0 needs 'echo': true", {"param": "max_tokens"})
        if len(self.prompt) * self.num_choices > MAX_REQUESTS:
            raise PydanticCustomError(
                "too_many", f"prompts times n may be {MAX_REQUESTS} at most", {"param": "n"}
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int:
        """At least 1: also an echo alone is computed up to a token, which is then not shown."""
        return max(DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens, 1)
