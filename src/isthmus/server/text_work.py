"""What is asked of texts alone, each from bytes to bytes: so it runs in a thread or in a process apart.

    a path       the body of a request to it, to the body of the answer
    CHAT         a Conversation as JSON, to Prompted: its token ids
    COMPLETION   {"texts": texts or token ids, "add_special": bool}, to Prompted: token ids of each

Errors are ApiErrors. No engine is needed; of it only the context is known.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.errors import UsageError
from isthmus.server.body import parsed, validated
from isthmus.server.dialect import Dialect
from isthmus.server.errors import ApiError, model_not_found
from isthmus.server.prompts import Conversation, Prompted, Prompts
from isthmus.server.schemas.anthropic import CountRequest
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from isthmus.server.unsupported import IN_PROMPTS, refuse_unsupported
from isthmus.tokenizer.json_lines import decode

if TYPE_CHECKING:
    from isthmus.tokenizer import ChatTemplate, Tokenizer

CHAT, COMPLETION = "chat", "completion"


@dataclass(frozen=True)
class TextSide:
    prompts: Prompts
    dialect: Dialect
    names: tuple[str, ...]  # of the model, for clients

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, template: ChatTemplate, parsers: tuple[str, str], names: tuple[str, ...]
    ) -> TextSide:
        """parsers: of tool calls and of thoughts, as they are given on a command line."""
        dialect = Dialect.of(template.source, *parsers)
        return cls(Prompts(tokenizer, template, dialect), dialect, names)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prompts.tokenizer

    def ids_of(self, chat: ChatRequest) -> list[int]:
        return self.tokenizer.encode_segments(self.prompts.segments_of(self.prompts.conversation_of(chat)))

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a name that is not this model's."""
        if name is not None and name not in self.names:
            raise model_not_found(name, self.names[0])


def of_chat(side: TextSide, data: bytes, context_tokens: int | None) -> bytes:
    assert context_tokens is not None
    return _pack(side.prompts.of_conversation(Conversation(**decode(data)), context_tokens))


def of_completion(side: TextSide, data: bytes, context_tokens: int | None) -> bytes:
    assert context_tokens is not None
    given = decode(data)
    return _pack(side.prompts.of_texts(given["texts"], context_tokens, add_special=given["add_special"]))


class _Packed(msgspec.Struct):
    """Prompted, its ids as int32 of this machine: a list of a million integers takes 50 ms."""

    prompts: list[bytes]
    inside: bool


def _pack(prompted: Prompted) -> bytes:
    prompts = [array("i", ids).tobytes() for ids in prompted.prompts]
    return msgspec.msgpack.encode(_Packed(prompts, prompted.inside))


def unpacked(data: bytes) -> Prompted:
    packed = msgspec.msgpack.decode(data, type=_Packed)
    return Prompted([list(array("i", each)) for each in packed.prompts], packed.inside)


def tokenize(side: TextSide, data: bytes, context_tokens: int | None) -> bytes:
    fields = parsed(data)
    refuse_unsupported(fields, IN_PROMPTS)
    body: ChatRequest | TokenizeRequest
    body = validated(fields, ChatRequest) if "messages" in fields else validated(fields, TokenizeRequest)
    side.check_model(body.model)
    if isinstance(body, ChatRequest):
        ids = side.ids_of(body)
    else:
        ids = side.tokenizer.encode(
            body.content,
            add_special=body.add_special is True,
            parse_special=body.parse_special is not False,
        )
    with_pieces = fields.get("with_pieces") is True
    return msgspec.json.encode(
        {
            "tokens": [_with_piece(side.tokenizer, token) for token in ids] if with_pieces else ids,
            "count": len(ids),
            "max_model_len": context_tokens,
        }
    )


def detokenize(side: TextSide, data: bytes, context_tokens: int | None) -> bytes:
    body = validated(parsed(data), DetokenizeRequest)
    side.check_model(body.model)
    try:
        text = side.tokenizer.decode(body.tokens, skip_special=False)
    except UsageError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens", code="invalid_value") from None
    return msgspec.json.encode({"content": text, "prompt": text})


def apply_template(side: TextSide, data: bytes, context_tokens: int | None) -> bytes:
    fields = parsed(data)
    refuse_unsupported(fields, IN_PROMPTS)
    chat = validated(fields, ChatRequest)
    side.check_model(chat.model)
    segments = side.prompts.segments_of(side.prompts.conversation_of(chat))
    return msgspec.json.encode({"prompt": "".join(segment.text for segment in segments)})


def count_tokens(side: TextSide, data: bytes, context_tokens: int | None) -> bytes:
    chat = validated(validated(parsed(data), CountRequest).chat_fields(), ChatRequest)
    side.check_model(chat.model)
    return msgspec.json.encode({"input_tokens": len(side.ids_of(chat))})


WORK: dict[str, Callable[[TextSide, bytes, int | None], bytes]] = {
    CHAT: of_chat,
    COMPLETION: of_completion,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": apply_template,
    "/v1/messages/count_tokens": count_tokens,
}


def _with_piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """The text of a token; its bytes where it is part of a character."""
    data = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
