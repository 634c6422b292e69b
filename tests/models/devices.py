"""Models on the stand-in of a GPU beside the native ones: the same files, the same steps, the same routes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.config import RunOptions
from isthmus.formats.kv_cache import KvDtype
from isthmus.models.base import Model, load_model
from isthmus.modules.on_gpu.target import Target, Targets
from isthmus.modules.split import ExpertSplit
from isthmus.weights.source import open_weights
from models import tiny
from models.steps import Session, prompt_of

# Design section 6: logits of bf16 weights against fp32 ones. A device rounds rows between products to bf16,
# as those of transformers in bf16 are; with experts on the CPU their x is rounded to 8 bits too.
BOUND = 0.08

PROMPTS = [prompt_of(length, tiny.VOCAB, seed) for seed, length in enumerate([70, 9, 41])]
# A chunk, rows too few for one, another chunk; a chunk between decodes; decodes.
STEPS = [
    list(enumerate(PROMPTS)),
    [(0, [3]), (1, prompt_of(40, tiny.VOCAB, 7)), (2, [5])],
    [(0, [11]), (1, [12]), (2, [13])],
    [(2, [21]), (0, [23])],
]
Routes = dict[int, list[tuple[Tensor, Tensor]]]  # by layer: of each step


def native(path: Path) -> Model:
    """With an fp32 cache: attention rounds nothing then, on any instruction set."""
    return load_model(open_weights(path), RunOptions(threads=2, kv_dtype="f32"))


def on_targets(path: Path, targets: Targets, *, exact: bool = False, kv_dtype: KvDtype = "bf16") -> Model:
    options = RunOptions(threads=2, exact_batching=exact, kv_dtype=kv_dtype)
    return load_model(open_weights(path), options, targets=targets)


def resident(path: Path, *, exact: bool = False, kv_dtype: KvDtype = "bf16", **options: Any) -> Model:
    """Strategy `gpu`: everything on one target."""
    target = Target.of("cpu", exact=exact, **options)
    return on_targets(path, Targets.one(target, all_resident(path)), exact=exact, kv_dtype=kv_dtype)


def split(path: Path, residual: torch.dtype = torch.bfloat16) -> tuple[Model, ExpertSplit]:
    """Strategy `hybrid`: routed experts on the CPU, by a thread of their own."""
    hand = ExpertSplit("threaded", 512, {"dtype": "bf16" if residual == torch.bfloat16 else "f32"})
    return on_targets(path, Targets.one(Target.of("cpu", residual=residual, split=hand))), hand


def all_resident(path: Path) -> dict[int, Sequence[int]]:
    """Every expert of every layer in the slot of its number."""
    tensors = open_weights(path).tensors.values()
    gates = [tensor for tensor in tensors if tensor.name.endswith("ffn_gate_exps.weight")]
    return {int(gate.name.split(".")[1]): range(gate.shape[0]) for gate in gates}


def run(model: Model, steps: Any = STEPS) -> Tensor:
    """Logits of every row of every step, in order."""
    session = Session(model, len(PROMPTS))
    return torch.cat([logits for pieces in steps for logits in session.step(pieces)])


def recorded(model: Model) -> Routes:
    """What the model's routers choose from now on."""
    routes: Routes = {}
    for index, layer in _routed_layers(model):
        taken = routes[index] = []

        def keep(x: Tensor, router: Any = layer.ffn.router, taken: Any = taken) -> tuple[Tensor, Tensor]:
            taken.append(router(x))
            return taken[-1]

        layer.ffn.router = keep
    return routes


def replayed(model: Model, routes: Routes) -> Model:
    """The model, taking these routes step by step: a near-tie that falls otherwise would change a whole
    expert."""
    for index, layer in _routed_layers(model):
        turns = iter(routes[index])
        layer.ffn.router = lambda _, turns=turns: next(turns)
    return model


def _routed_layers(model: Any) -> list[tuple[int, Any]]:
    return [(i, layer) for i, layer in enumerate(model.layers) if hasattr(layer.ffn, "router")]


def agreement(model: Model, routes: Routes, steps: Any = STEPS) -> float:
    """Share of the model's own choices that are among these, row for row; near-ties fall either way."""
    own = recorded(model)
    run(model, steps)
    same = [
        (a[:, :, None] == b[:, None, :]).any(-1).flatten()
        for index in routes
        for (a, _), (b, _) in zip(own[index], routes[index], strict=True)
    ]
    return float(torch.cat(same).float().mean()) if same else 1.0


def distance(got: Tensor, wanted: Tensor) -> float:
    """Largest difference in units of the wanted logits' standard deviation."""
    return float((got - wanted).abs().max() / wanted.std())
