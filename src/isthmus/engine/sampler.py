"""From a row of logits to a token.

The vocabulary is never sorted (152k logits took 19.6 ms): the few hundred largest are selected first, and
only where these do not settle the question exactly (a flat distribution under top_p) is a larger pool taken.
The result is that of the definition over the whole vocabulary, always.

    penalties -> logit bias -> temperature -> top_k -> top_p of what top_k left -> min_p -> draw

Equal logits count in the order of their ids. A row with NaN or infinities is an error: replacing them would
give random text that looks like an answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from torch import Tensor

from isthmus.engine.request import SamplingParams

# Candidates selected first. Sharp distributions reach top_p = 0.95 within some dozens of tokens, and top_k is
# rarely above 100; each growth is by this factor until the pool is the vocabulary.
POOL_TOKENS = 256
POOL_GROWTH = 16

# Ids per group when the pool is selected: the maxima of groups bound the pool's smallest member from below.
GROUP_IDS = 64


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

    def sample(self, logits: Tensor) -> int:
        """logits: [vocab] f32, not changed. Raises SamplingError unless all are finite."""
        check_finite(logits)
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
        point = self._random.random() * float(cumulative[-1])
        index = int(torch.searchsorted(cumulative, point, right=True))
        return int(ids[min(index, len(ids) - 1)])  # rounding may put the point on the end itself


def check_finite(logits: Tensor) -> None:
    """One pass: minimum and maximum carry any NaN, and are the infinities if there are some."""
    low, high = torch.aminmax(logits)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise SamplingError(
            f"the model's logits are not finite (from {float(low)} to {float(high)}): "
            "a damaged weight file, or values beyond its number format"
        )


def survivors(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Ids that may be drawn and their weights f32 (not normalised). logits: [vocab] f32.

    The most probable come first; without top_k and top_p no order is needed, and the ids ascend.
    """
    vocab_size = len(logits)
    highest = logits.max()

    def weigh(values: Tensor) -> Tensor:
        """Weight 1 for the largest: nothing overflows, and min_p is a bound on the weight itself."""
        return ((values - highest) / temperature).exp_()

    top_k = min(top_k, vocab_size) or vocab_size
    if top_k == vocab_size and top_p == 1.0:
        weights = weigh(logits)
        if min_p == 0.0:
            return torch.arange(vocab_size), weights
        ids = (weights >= min_p).nonzero().squeeze(1)
        return ids, weights[ids]

    pool = min(POOL_TOKENS, vocab_size) if top_k == vocab_size else top_k
    total = None  # weight of the whole vocabulary, where top_k does not cut it
    while True:
        ids = largest(logits, pool)
        kept = weigh(logits[ids])
        if pool < top_k and total is None:
            total = float(weigh(logits).sum(dtype=torch.float64))
        mass = float(kept.sum(dtype=torch.float64)) if pool == top_k or total is None else total
        count = _nucleus(kept, top_p * mass) if top_p < 1.0 else pool
        if count < pool or pool == top_k:
            break
        pool = min(pool * POOL_GROWTH, vocab_size)
    count = min(count, int((kept >= min_p).sum())) if min_p > 0.0 else count
    return ids[:count], kept[:count]


def largest(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits, largest first, equal ones in the order of their ids.

    The count-th largest of the maxima of groups of 64 is a bound that at least `count` logits reach; what
    reaches it is little more than that, and only this is sorted.
    """
    vocab_size = len(logits)
    groups = vocab_size // GROUP_IDS
    if count < groups:
        maxima = logits[: groups * GROUP_IDS].view(groups, GROUP_IDS).amax(dim=1)
        bound = maxima.topk(count).values[-1]
    else:
        bound = logits.topk(count).values[-1]
    candidates = (logits >= bound).nonzero().squeeze(1)
    order = logits[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:count]]


def _nucleus(weights: Tensor, mass: float) -> int:
    """How many of the descending weights reach `mass` together: at least 1, all of them if they do not."""
    reached = int(torch.searchsorted(weights.cumsum(0, dtype=torch.float64), mass))
    return min(reached + 1, len(weights))
