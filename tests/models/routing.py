"""Which experts were chosen, recorded in one model and replayed in another.

Between two runs that differ by rounding, a router's near-tie may fall either way (design 1.6), and then a
whole expert differs. A test of products takes that out: both runs use the routes of one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus.models.base import Model

Routes = tuple[Tensor, Tensor]  # ids int32 [T, k], weights fp32 [T, k]


def of_transformers(model: Any, prompt: list[int]) -> list[Routes | None]:
    """Each layer's routes of a transformers model; None for a dense one."""
    routes: list[Routes | None] = [None] * model.config.num_hidden_layers
    hooks = []
    for index, layer in enumerate(model.model.layers):
        gate = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        if gate is not None:

            def keep(_: Any, __: Any, output: tuple[Tensor, ...], index: int = index) -> None:
                _, weights, ids = output
                routes[index] = ids.int().contiguous(), weights.float().contiguous()

            hooks.append(gate.register_forward_hook(keep))
    with torch.no_grad():
        model(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return routes


def recorded(model: Model) -> list[Routes | None]:
    """Routes of our model, filled in by its next step."""
    routes: list[Routes | None] = [None] * len(model.layers)  # type: ignore[attr-defined]
    for index, layer in enumerate(model.layers):  # type: ignore[attr-defined]
        if router := getattr(layer.ffn, "router", None):

            def keep(x: Tensor, index: int = index, router: Any = router) -> Routes:
                routes[index] = router(x)
                return routes[index]  # type: ignore[return-value]

            layer.ffn.router = keep
    return routes


def replay(model: Model, routes: list[Routes | None]) -> Model:
    """The model, taking these routes whatever its routers would choose."""
    for layer, taken in zip(model.layers, routes, strict=True):  # type: ignore[attr-defined]
        if taken is not None:
            layer.ffn.router = lambda _, taken=taken: taken
    return model


def agreement(one: list[Routes | None], other: list[Routes | None]) -> float:
    """Share of the choices (row, layer, place) that are among the other's for the same row and layer."""
    same = [
        (a[0][:, :, None] == b[0][:, None, :]).any(-1)
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None
    ]
    return float(torch.cat([part.flatten() for part in same]).float().mean()) if same else 1.0
