"""Expert deferral: of a sampled token's experts those of lowest weight join one layer of experts later.

    out[l] = residual + shared + now[l] + late[l - 1]        now + late: all that the router chose in layer l

`late` is computed from its own layer's input and added one layer of experts later, so the CPU works on it
while the device is in the next attention. That changes what the model computes: it is approximate, opt-in,
and said wherever a run is described. Which experts are late is decided within each token, and whether any are
by the token alone (it was sampled, not given): an answer does not depend on its neighbours, on chunks, or on
having been computed before. Nor on where an expert is: one that the device has (by a profile, in the cache,
through the ring) could join at once, but then what a cache holds, which is other requests' doing, would
change the answer. Never of a prompt's tokens, and never in a device's last layer of experts, whose late ones
nobody would take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.native import choices


def divided(ids: Tensor, weights: Tensor, sampled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(choices for now, those for later), each int32 [T, k] with -1 in the place of the other's.

    ids int32 (or the slots they are in), weights fp32 [T, k]; sampled int32 [T], not 0 for tokens of which
    `count` choices are late. A recorded operator of the CPU; `divided_on` is the same in torch.
    """
    now, later = torch.empty_like(ids), torch.empty_like(ids)
    tokens, k = ids.shape
    choices.defer(
        ids.data_ptr(),
        weights.data_ptr(),
        sampled.data_ptr(),
        tokens,
        k,
        count,
        now.data_ptr(),
        later.data_ptr(),
    )
    return now, later


def late_choices(weights: Tensor, sampled: Tensor, count: int) -> Tensor:
    """bool [T, k]: the choices that `divided` puts to later; on any device."""
    place = weights.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # 0: the highest weight
    return (place >= weights.shape[1] - count) & (sampled != 0)[:, None]


def divided_on(ids: Tensor, late: Tensor) -> tuple[Tensor, Tensor]:
    """As `divided`, on any device; late: of `late_choices`."""
    return ids.masked_fill(late, choices.NO_EXPERT), ids.masked_fill(~late, choices.NO_EXPERT)
