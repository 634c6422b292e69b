"""Log-probabilities of tokens, as the model gives them: before penalties, bias, grammar and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.engine.request import TokenLogprob
from isthmus.engine.sampler import largest


class RowLogprobs:
    """What a row says of any token, taken before a grammar writes into it. logits: finite f32 [vocab]."""

    def __init__(self, logits: Tensor, count: int) -> None:
        self._logits = logits
        self._normaliser = float(torch.logsumexp(logits, 0))
        self._top: tuple[tuple[int, float], ...] = ()
        if count:
            values, ids = largest(logits, min(count, len(logits)))
            of_ids = (values - self._normaliser).tolist()
            self._top = tuple(zip(ids.tolist(), of_ids, strict=True))

    def of(self, token: int) -> TokenLogprob:
        """`token`: one whose logit still stands in the row."""
        return TokenLogprob(token, float(self._logits[token]) - self._normaliser, self._top)


def prompt_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Of each of `tokens`, the row before which says how probable it was. logits: f32 [>= tokens, vocab]."""
    return [RowLogprobs(row, count).of(token) for row, token in zip(logits, tokens, strict=False)]
