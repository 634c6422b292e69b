"""Text to token ids and back, for one vocabulary.

Text is first cut at special tokens, where its author may write them, and the ordinary runs between go to the
backend. So user text cannot become a control token, whatever it says. Ids outside the vocabulary are errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isthmus.config import tokenize_in_calling_thread
from isthmus.errors import ContextLengthError, ModelFileError, UsageError
from isthmus.tokenizer.byte_level import to_bytes
from isthmus.tokenizer.gguf_tokenizer import build_byte_level, build_sentencepiece, find_pre_tokenizer
from isthmus.tokenizer.literals import any_of
from isthmus.tokenizer.markers import END_OF_TURN, HARMONY, is_marker
from isthmus.tokenizer.segment import Segment
from isthmus.tokenizer.vocabulary import TokenizerWarning, TokenType, Vocabulary
from isthmus.weights.metadata import Metadata

if TYPE_CHECKING:
    from tokenizers import Encoding

_SPACE = "\u2581"  # SentencePiece's visible space


class Tokenizer:
    """`stop_ids`: any of them ends an answer. `chat_template`: the file's Jinja source, or None."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """May warn with TokenizerWarning; raises MalformedFileError for merges that name unknown tokens."""
        self._vocabulary = vocabulary
        tokens = vocabulary.tokens
        self._sentencepiece = vocabulary.model == "llama"
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.ids.get("bos")
        self.eos_id = vocabulary.ids.get("eos")
        self.chat_template = vocabulary.chat_template
        self.stop_ids = self._find_stop_ids()
        hidden = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)
        named = [vocabulary.ids[name] for name in ("bos", "eos", "eot", "eom") if name in vocabulary.ids]
        self._special = frozenset([*hidden, *named])
        user_defined = vocabulary.of_type(TokenType.USER_DEFINED)
        self._plain = {
            tokens[i]: i for i in user_defined if not is_marker(tokens[i]) and i not in self._special
        }
        parsed = [*vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN), *named, *user_defined]
        self._literals = {tokens[i]: i for i in parsed}
        self._find_plain = any_of(self._plain)
        self._find_literal = any_of(self._literals)
        excluded = self._special | set(self._literals.values())
        if self._sentencepiece:
            self._backend = build_sentencepiece(vocabulary, excluded)
            default_bos = True
        else:
            pre = find_pre_tokenizer(vocabulary.pre)
            self._backend = build_byte_level(vocabulary, pre, excluded)
            default_bos = pre.add_bos
        self.add_bos = self._can_add("bos", default_bos if vocabulary.add_bos is None else vocabulary.add_bos)
        self.add_eos = self._can_add("eos", vocabulary.add_eos)
        self._bytes: dict[int, bytes] = {}
        tokenize_in_calling_thread()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """ModelFileError for a vocabulary that cannot be used; it names the file where the metadata does."""
        try:
            return cls(Vocabulary.from_gguf(metadata))
        except ModelFileError as error:
            if isinstance(metadata, Metadata):
                raise type(error)(f"{metadata.path}: {error}") from error
            raise

    @property
    def strips_leading_space(self) -> bool:
        """SentencePiece writes a space before the first word; decoding a whole text takes it away."""
        return self._sentencepiece and self._vocabulary.add_space_prefix

    @property
    def special_literals(self) -> frozenset[str]:
        """Texts that become one special token where parsed: control tokens and markers such as `<think>`."""
        return frozenset(self._literals) - frozenset(self._plain)

    def special_id(self, literal: str) -> int | None:
        """The special token that is written so, if there is one."""
        return self._literals.get(literal) if literal not in self._plain else None

    def token_text(self, token: int) -> str:
        """The token as the vocabulary writes it (`<|im_end|>`, `Ġhello`)."""
        return self._vocabulary.tokens[self._checked(token)]

    def is_special(self, token: int) -> bool:
        """True for tokens that are no text of an answer: control, unknown, unused, bos, eos, eot, eom."""
        return self._checked(token) in self._special

    def encode(
        self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None
    ) -> list[int]:
        """Ids of `text`. `add_special`: one BOS (and EOS) where the model wants it, never two.

        `parse_special`: texts of special tokens become those tokens; leave it off for anything a user wrote.
        ContextLengthError if there are more than `most`, BOS and EOS not counted.
        """
        ids = self._encode([Segment(text, parse_special)], most)
        if not add_special:
            return ids
        ids = self._with_bos(ids)
        if self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def encode_segments(
        self, segments: Sequence[Segment], *, add_bos: bool = True, most: int | None = None
    ) -> list[int]:
        """Ids of a rendered chat prompt. Ordinary text is encoded across segment borders, as one string.

        ContextLengthError, with their number, if there are more than `most`, a BOS not counted.
        """
        ids = self._encode(segments, most)
        return self._with_bos(ids) if add_bos else ids

    def encode_inside(self, text: str) -> list[int]:
        """Ids of ordinary text that goes on from other text: no BOS, no space of SentencePiece before it."""
        return list(self._encode_run(_checked_text(text), after_special=False).ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(
            self.token_bytes(token) for token in ids if not (skip_special and self.is_special(token))
        )
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes the token adds to a text, maybe part of a character; its literal if it is special."""
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._compute_bytes(self._checked(token))
        return data

    def _encode(self, segments: Sequence[Segment], most: int | None = None) -> list[int]:
        """What is beyond `most` is counted and not made: a million integers hold everybody up for 50 ms."""
        ids: list[int] = []
        num_ids = 0
        for piece in self._runs(segments):
            num_ids += 1 if isinstance(piece, int) else len(piece)
            if most is None or num_ids <= most:
                ids += [piece] if isinstance(piece, int) else piece.ids
        if most is not None and num_ids > most:
            raise ContextLengthError(f"the text has {num_ids} tokens; {most} fit", num_ids, most)
        return ids

    def _runs(self, segments: Sequence[Segment]) -> Iterator[int | Encoding]:
        """Special tokens, and what the backend makes of the ordinary text between them."""
        run: list[str] = []
        after_special = True  # SentencePiece puts its space at the start and after every special token
        for piece in self._pieces(segments):
            if isinstance(piece, str):
                run += [piece] if piece else []
                continue
            if run:
                yield self._encode_run("".join(run), after_special)
            yield piece
            run, after_special = [], True
        if run:
            yield self._encode_run("".join(run), after_special)

    def _pieces(self, segments: Sequence[Segment]) -> Iterator[str | int]:
        """Ordinary text and ids of special tokens, in order."""
        for segment in segments:
            text = _checked_text(segment.text)
            literals = self._literals if segment.special else self._plain
            find = self._find_literal if segment.special else self._find_plain
            end = 0
            for match in find.finditer(text) if find else ():
                yield text[end : match.start()]
                yield literals[match[0]]
                end = match.end()
            yield text[end:]

    def _encode_run(self, text: str, after_special: bool) -> Encoding:
        if self._sentencepiece and text:  # of no text there is no space either
            text = text.replace(" ", _SPACE)
            if after_special and self._vocabulary.add_space_prefix:
                text = _SPACE + text
        # Of a batch, since that leaves the interpreter's lock: `encode` holds it, 1.4 s for a megabyte.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0]

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.add_bos or self.bos_id is None:
            return ids
        written = next((i for i, token in enumerate(ids) if token != self.bos_id), len(ids))
        return [self.bos_id, *ids[written:]]

    def _find_stop_ids(self) -> frozenset[int]:
        vocabulary = self._vocabulary
        ends = END_OF_TURN - {"<|end|>"} if set(vocabulary.tokens) >= HARMONY else END_OF_TURN
        control = vocabulary.of_type(TokenType.CONTROL, TokenType.USER_DEFINED)
        named = [vocabulary.ids[name] for name in ("eos", "eot", "eom") if name in vocabulary.ids]
        return frozenset([*named, *(token for token in control if vocabulary.tokens[token] in ends)])

    def _can_add(self, name: str, wanted: bool) -> bool:
        if wanted and name not in self._vocabulary.ids:
            warnings.warn(
                f"tokenizer.ggml.add_{name}_token is set, but tokenizer.ggml.{name}_token_id is missing: "
                f"no {name.upper()} is added",
                TokenizerWarning,
                stacklevel=4,
            )
            return False
        return wanted

    def _compute_bytes(self, token: int) -> bytes:
        text = self._vocabulary.tokens[token]
        if self._sentencepiece:
            if self._vocabulary.types[token] == TokenType.BYTE:
                return bytes([int(text[3:5], 16)])
            return text.replace(_SPACE, " ").encode("utf-8", "replace")
        return text.encode("utf-8", "replace") if text in self._literals else to_bytes(text)

    def _checked(self, token: int) -> int:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
            raise UsageError(
                f"token id {token!r} is outside the vocabulary: ids are 0 to {self.vocab_size - 1}"
            )
        return token


def _checked_text(text: str) -> str:
    """`text` with every lone surrogate, which has no UTF-8, as U+FFFD."""
    if not isinstance(text, str):
        raise UsageError(f"text to encode must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
