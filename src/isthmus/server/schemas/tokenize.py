"""What requests to `/tokenize` and `/detokenize` may say: llama-server's fields, and vLLM's names of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field

from isthmus.server.schemas.base import Body, ModelName, TokenId

MAX_IDS = 1 << 20


class TokenizeRequest(Body):
    model: ModelName = None
    content: Annotated[str, Field(validation_alias=AliasChoices("content", "prompt"))]
    # Whether the text gets the model's BOS; false if not said, as at llama-server.
    add_special: Annotated[
        bool | None, Field(validation_alias=AliasChoices("add_special", "add_special_tokens"))
    ] = None
    parse_special: bool | None = None  # whether texts of special tokens become them; true if not said
    with_pieces: bool | None = None


class DetokenizeRequest(Body):
    model: ModelName = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_IDS)]
