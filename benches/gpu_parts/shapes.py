"""Models for the parts that run a whole one: built-in shapes cut to a few layers, and tiny ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from gpu_parts.lines import Setting
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.weights.dummy import DummySource
from isthmus.weights.shape_grouped import GroupedShape
from isthmus.weights.shape_latent import LatentShape
from isthmus.weights.shapes import SHAPES

# So small that torch's references, too, run them at once: grouped-query and latent attention.
_TINY = {
    "tiny-qwen3moe": GroupedShape(
        arch="qwen3moe",
        layers=2,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=8,
        top_k=2,
        inner=256,
        dense_inner=512,
        vocab=512,
        context=2048,
        eps=1e-6,
        head_norms="each",
    ),
    "tiny-deepseek2": LatentShape(
        layers=2,
        hidden=256,
        heads=4,
        q_lora=256,
        dense_layers=1,
        dense_inner=512,
        experts=8,
        top_k=2,
        shared=1,
        inner=256,
        vocab=512,
        context=2048,
        sigmoid=True,
        weights_scale=1.0,
    ),
}
TINY = tuple(f"dummy:{name}" for name in _TINY)


@cache
def source_of(model: str) -> DummySource:
    """Kept: its random blocks take longer to make than a small model to load."""
    with patch.dict(SHAPES, _TINY):  # which are nobody else's business
        return DummySource(model)


def start(setting: Setting, model: str, **options: Any) -> Engine:
    """On the setting's GPU, or on the CPU in its place; strategy cpu on the CPU itself."""
    source = source_of(model)
    if options["strategy"] == "cpu":
        return Engine(Path(model), RunOptions(**options), source=source)
    if setting.on_gpu:
        return Engine(Path(model), RunOptions(device=str(setting.device), **options), source=source)
    detect = Machine.detect
    card = Gpu(0, "a stand-in", 8 << 30, 8 << 30, "8.0")
    Machine.detect = classmethod(lambda cls: Machine(2, 8 << 30, 8 << 30, gpus=(card,)))  # type: ignore
    try:
        stand_ins = {"cuda:0": torch.device("cpu")}
        on = RunOptions(device="cuda:0", **options)
        return Engine(Path(model), on, source=source, stand_ins=stand_ins)
    finally:
        Machine.detect = detect  # type: ignore[method-assign]
