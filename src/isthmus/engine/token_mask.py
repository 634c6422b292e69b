"""Grammars for the step loop: rows of logits, in which only tokens that a grammar allows are left open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from isthmus.engine.grammar import GrammarCompiler, error_of
from isthmus.engine.mask import TokenMask
from isthmus.engine.request import Grammar
from isthmus.tokenizer import Tokenizer


class GrammarMask:
    """One answer under one grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._allowed: Tensor | None = None

    def accept(self, token: int) -> None:
        self._allowed = None
        if not self._matcher.consume_token(token):
            raise ValueError(error_of(self._matcher))

    def prepare(self) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # a limit of the parser: nothing is certain any more
            raise ValueError(error_of(self._matcher))
        self._allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()

    def allowed(self) -> Tensor:
        """bool [vocab]: tokens that may come next, those that end the answer among them. All False: none."""
        if self._allowed is None:
            self.prepare()
        assert self._allowed is not None
        return self._allowed


class VocabularyGrammars:
    """`Grammars` (see mask.py) over a model's own tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._compiler = GrammarCompiler(tokenizer)
        self._vocab_size = tokenizer.vocab_size

    def compile(self, grammar: Grammar) -> GrammarMask:
        return GrammarMask(self._compiler.compile(grammar))

    @torch.inference_mode()  # as the rows of a step were made
    def mask(self, rows: Sequence[tuple[TokenMask, Tensor]]) -> None:
        for mask, row in rows:
            assert isinstance(mask, GrammarMask)
            # Rows may be longer than the vocabulary (padding of the embedding), and bits are padded too.
            size = min(self._vocab_size, len(row))
            row[:size].masked_fill_(~mask.allowed()[:size].to(row.device), float("-inf"))
            row[size:] = float("-inf")
