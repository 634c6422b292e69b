"""From a row of logits to a token.

The vocabulary is never sorted (152k logits took 19.6 ms): the largest are selected, and of a nucleus only the
weights around its edge are ordered. The result is that of the definition over the whole vocabulary, always.

    penalties -> logit bias -> temperature -> top_k -> top_p of what top_k left -> min_p -> draw

Equal logits count in the order of their ids. A row with NaN or infinities is an error (`check_finite`):
replacing them would give random text that looks like an answer. A grammar's -inf come after that check.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from isthmus.engine.request import SamplingParams
from isthmus.native import sampling


class SamplingError(Exception):
    """The logits cannot be sampled from; the request ends with this message."""


class Sampler:
    """Chooses the tokens of one request. State: a seeded generator, and counts where penalties need them."""

    def __init__(self, params: SamplingParams, prompt: Iterable[int], vocab_size: int) -> None:
        self.params = params
        self._random = random.Random(params.seed)  # Mersenne Twister: the same on every platform
        bias = sorted(params.logit_bias.items())
        self._bias_ids = torch.tensor([token for token, _ in bias], dtype=torch.int64)
        self._bias = torch.tensor([value for _, value in bias], dtype=torch.float32)
        # Whether it chooses the largest of the logits as they are: then many rows can be chosen at once.
        self.is_argmax = params.greedy and not params.penalised and not bias
        self._seen = self._counts = torch.empty(0)
        if params.penalised:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)  # in prompt or answer
            self._seen[torch.tensor(list(prompt), dtype=torch.int64)] = True
            self._counts = torch.zeros(vocab_size)  # in the answer

    def sample(self, logits: Tensor) -> int:
        """logits: [vocab] f32, contiguous, not changed; -inf for a token that may not be chosen, -1 if none
        may."""
        return sample_rows([(self, logits)])[0]

    def took(self, token: int) -> None:
        """Counts a token that was chosen, if penalties need it."""
        if self.params.penalised:
            self._seen[token] = True
            self._counts[token] += 1

    def point(self) -> float:
        """Where in the distribution the next token is: one number for each token that is drawn."""
        return self._random.random()

    def adjusted(self, logits: Tensor) -> Tensor:
        """Penalties and bias applied, in a copy where there are any."""
        params = self.params
        if params.penalised:
            rescaled = torch.where(
                logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
            )
            logits = torch.where(self._seen, rescaled, logits)
            logits = logits - params.frequency_penalty * self._counts
            logits = logits - params.presence_penalty * (self._counts > 0)
        if len(self._bias_ids):
            logits = logits.index_add(0, self._bias_ids, self._bias)
        return logits


def sample_rows(pairs: Sequence[tuple[Sampler, Tensor]]) -> list[int]:
    """The next token of each sampler from its row f32 [vocab]: all that are drawn in one native call.

    -1 where every logit of a row is -inf. No sampler stands there twice.
    """
    adjusted = [sampler.adjusted(logits) for sampler, logits in pairs]
    tokens = [-1] * len(pairs)
    drawn = []
    for at, (sampler, _) in enumerate(pairs):
        if sampler.params.greedy:
            # numpy's argmax, the first of equals, takes 20 us of 152k logits where torch's takes 300.
            token = int(adjusted[at].numpy().argmax())
            tokens[at] = token if adjusted[at][token] != -math.inf else -1
        else:
            drawn.append(at)
    if drawn:
        choices = [(pairs[at][0].params, pairs[at][0].point()) for at in drawn]
        for at, token in zip(drawn, _draw([adjusted[at] for at in drawn], choices), strict=True):
            tokens[at] = token
    for (sampler, _), token in zip(pairs, tokens, strict=True):
        if token >= 0:
            sampler.took(token)
    return tokens


def _draw(logits: list[Tensor], choices: list[tuple[SamplingParams, float]]) -> list[int]:
    addresses = np.array([row.data_ptr() for row in logits], np.uint64)
    fields = [(p.temperature, p.top_k, p.top_p, p.min_p, point) for p, point in choices]
    numbers, tokens = np.array(fields, np.float64), np.empty(len(logits), np.int32)
    sampling.draw(addresses.ctypes.data, numbers.ctypes.data, len(logits), len(logits[0]), tokens.ctypes.data)
    drawn: list[int] = tokens.tolist()
    return drawn


def greedy(logits: Tensor) -> list[int] | None:
    """The most probable token of each row of f32 [R, vocab], contiguous, the lower id of equals.

    None if some logit is infinite or NaN.
    """
    return sampling.greedy(logits.data_ptr(), *logits.shape)


def argmax(logits: Tensor) -> list[int]:
    """The same where infinities may be: -inf of what a grammar forbids."""
    chosen: list[int] = logits.numpy().argmax(axis=1).tolist()
    return chosen


def check_finite(logits: Tensor) -> None:
    """SamplingError if f32 [vocab] or [R, vocab], contiguous, holds NaN or infinities."""
    if not sampling.all_finite(logits.data_ptr(), logits.numel()):
        low, high = torch.aminmax(logits)
        raise SamplingError(
            f"the model's logits are not finite (from {float(low)} to {float(high)}): "
            "a damaged weight file, or values beyond its number format"
        )


def survivors(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Ids int64 that may be drawn and their weights f32, 1 for the most probable. logits: [vocab] f32.

    In no order, but always the same: that in which a point is looked up.
    """
    ids, weights = torch.empty(len(logits), dtype=torch.int32), torch.empty(len(logits))
    count = sampling.survivors(
        logits.data_ptr(), len(logits), temperature, top_k, top_p, min_p, ids.data_ptr(), weights.data_ptr()
    )
    return ids[:count].long(), weights[:count]


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits and their ids int64, largest first, equal ones in the order of their ids."""
    values, ids = torch.empty(count), torch.empty(count, dtype=torch.int32)
    sampling.topn(logits.data_ptr(), len(logits), count, values.data_ptr(), ids.data_ptr())
    return values, ids.long()
