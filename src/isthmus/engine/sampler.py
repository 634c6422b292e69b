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
from collections.abc import Iterable

import torch
from torch import Tensor

from isthmus.engine.request import SamplingParams
from isthmus.native import rows


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
        self._seen = self._counts = torch.empty(0)
        if params.penalised:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)  # in prompt or answer
            self._seen[torch.tensor(list(prompt), dtype=torch.int64)] = True
            self._counts = torch.zeros(vocab_size)  # in the answer

    @property
    def is_argmax(self) -> bool:
        """Whether it chooses the largest of the logits as they are: then many rows can be chosen at once."""
        return self.params.greedy and not self.params.penalised and not len(self._bias_ids)

    def sample(self, logits: Tensor) -> int:
        """logits: [vocab] f32, contiguous, not changed; -inf for a token that may not be chosen."""
        logits = self._adjusted(logits)
        # numpy's argmax, the first of equals, takes 20 us of 152k logits where torch's takes 300.
        token = int(logits.numpy().argmax()) if self.params.greedy else self._draw(logits)
        if self.params.penalised:
            self._seen[token] = True
            self._counts[token] += 1
        return token

    def _adjusted(self, logits: Tensor) -> Tensor:
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

    def _draw(self, logits: Tensor) -> int:
        params = self.params
        ids, weights = survivors(logits, params.temperature, params.top_k, params.top_p, params.min_p)
        cumulative = weights.cumsum(0, dtype=torch.float64)
        end = float(cumulative[-1])
        # Rounding may put the point on the end itself, where a token of weight 0 could be the last.
        point = min(self._random.random() * end, math.nextafter(end, 0.0))
        return int(ids[torch.searchsorted(cumulative, point, right=True)])


def argmax(logits: Tensor) -> list[int]:
    """The most probable token of each row of f32 [R, vocab], the lower id of equals."""
    chosen: list[int] = logits.numpy().argmax(axis=1).tolist()
    return chosen


def check_finite(logits: Tensor) -> None:
    """SamplingError if f32 [vocab] or [R, vocab], contiguous, holds NaN or infinities."""
    if not rows.all_finite(logits.data_ptr(), logits.numel()):
        low, high = torch.aminmax(logits)
        raise SamplingError(
            f"the model's logits are not finite (from {float(low)} to {float(high)}): "
            "a damaged weight file, or values beyond its number format"
        )


def survivors(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Ids that may be drawn and their weights f32 (not normalised). logits: [vocab] f32.

    In no order, but always the same.
    """
    vocab_size = len(logits)
    highest = logits.max()

    def weigh(values: Tensor) -> Tensor:
        """Weight 1 for the largest: nothing overflows, and min_p is a bound on the weight itself."""
        return ((values - highest) / temperature).exp_()

    if 0 < top_k < vocab_size:
        values, ids = largest(logits, top_k)
        weights = weigh(values)
        count = _reaching(weights, top_p * float(weights.sum(dtype=torch.float64))) if top_p < 1.0 else top_k
        ids, weights = ids[:count], weights[:count]
    else:
        weights = weigh(logits)
        if top_p == 1.0 and min_p == 0.0:
            return torch.arange(vocab_size), weights
        if top_p < 1.0:
            ids = nucleus(weights, top_p * float(weights.sum(dtype=torch.float64)))
            weights = weights[ids]
        else:
            ids = torch.arange(vocab_size)
    kept = weights >= min_p
    return ids[kept], weights[kept]


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits and their ids int64, largest first, equal ones in the order of their ids."""
    values, ids = torch.empty(count), torch.empty(count, dtype=torch.int32)
    rows.topn(logits.data_ptr(), len(logits), count, values.data_ptr(), ids.data_ptr())
    return values, ids.long()


def nucleus(weights: Tensor, mass: float) -> Tensor:
    """Ids int64, in no order, of the fewest of the largest weights f32 that reach `mass` together."""
    ids = torch.empty(len(weights), dtype=torch.int32)
    count = rows.nucleus(weights.data_ptr(), len(weights), mass, ids.data_ptr())
    return ids[:count].long()


def _reaching(weights: Tensor, mass: float) -> int:
    """How many of the descending weights reach `mass` together: at least 1, all of them if they do not."""
    reached = int(torch.searchsorted(weights.cumsum(0, dtype=torch.float64), mass))
    return min(reached + 1, len(weights))
