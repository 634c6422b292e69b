"""What the request bodies of all endpoints share: strictness, and the bounded types their fields are made of.

The bounds that the engine also holds are imported from it. Strict: "7" is not a number here and 1.5 not a
count. Unknown fields are ignored; those that would change the answer are refused before (unsupported.py).
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from isthmus.engine.request import (
    MAX_INT,
    MAX_LOGIT_BIAS,
    MAX_SALT_CHARACTERS,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

MAX_NAME_CHARACTERS = 256
MAX_CHOICES = 128  # OpenAI's own bound of n

_TOKEN_ID = re.compile(r"[0-9]{1,8}")


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


def _as_list(stop: Any) -> Any:
    if not isinstance(stop, str | list):
        raise PydanticCustomError("text_or_list", "must be a string or a list of strings")
    return [stop] if isinstance(stop, str) else stop


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    list[StopText],
    Field(max_length=MAX_STOP_STRINGS),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}}]}
    ),
]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
ModelName = Annotated[str | None, Field(max_length=4096)]  # None: the one that is served
TokenLimit = Annotated[int | None, Field(ge=1, le=MAX_INT)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float | None, Field(ge=-2, le=2)]


class StreamOptions(Body):
    include_usage: bool | None = None


class Sampling(Body):
    """How tokens are chosen, how many, and how they are sent: the same for a chat and a text."""

    model: ModelName = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # vLLM's: prompts are found in the cache by requests of the same salt alone.
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] = None
    return_progress: bool | None = None  # llama-server's: how far the prompt is, in a chat's stream
    max_tokens: TokenLimit = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None
    ignore_eos: bool | None = None  # vLLM's and llama-server's: the model's end tokens end nothing

    temperature: Annotated[float | None, Field(ge=0, le=10)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_INT)] = None  # 0 and -1: off
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    repetition_penalty: Annotated[
        float | None,
        Field(ge=0.01, le=10, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")),
    ] = None
    logit_bias: Annotated[dict[str, _Bias] | None, Field(max_length=MAX_LOGIT_BIAS)] = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not _TOKEN_ID.fullmatch(key):
                raise PydanticCustomError(
                    "token_id", "its keys must be token ids, that is whole numbers from 0"
                )
        return value

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The most probable tokens to show beside each token; None: no log-probabilities."""
        return None

    def sampling_params(self) -> SamplingParams:
        """What was asked for, over the engine's defaults; null means default."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": max(self.top_k, 0) if self.top_k is not None else None,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": {int(key): value for key, value in (self.logit_bias or {}).items()},
            "seed": self.seed,
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "max_tokens": self.token_limit,
            "logprobs": self.num_logprobs,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
