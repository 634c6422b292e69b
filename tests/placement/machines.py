"""Machines that people have, and the bytes of models by gguf-py, never by the plan."""

from __future__ import annotations

import math
from typing import Any

import gguf

from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.placement.plan import Plan
from isthmus.weights.dummy import DummySource
from isthmus.weights.source import RawTensor

GIB = 1 << 30


def card(index: int = 0, *, free: float = 23.5, total: int = 24, **changes: Any) -> Gpu:
    """An RTX 4090."""
    known = {"pcie_generation": 4, "pcie_width": 16, "memory_gb_s": 1008.0, "driver": "570.86.10"}
    return Gpu(index, "RTX 4090", total * GIB, int(free * GIB), "8.9", **(known | changes))


def machine(ram: int, *gpus: Gpu, **changes: Any) -> Machine:
    return Machine(32, ram * GIB, ram * GIB, read_gb_s=300.0, gpus=gpus, **changes)


def size(raw: RawTensor) -> int:
    """Bytes of a tensor in the file, as gguf-py has them."""
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(raw.format.ggml_id)]
    return math.prod(raw.shape) // block * nbytes


def routed_bytes(source: DummySource) -> int:
    return sum(size(raw) for raw in source.tensors.values() if "_exps" in raw.name)


def dense_gpu_bytes(source: DummySource) -> int:
    """On a GPU all is as in the file, but for the halves of kv_b, which are bf16."""
    dense = [raw for raw in source.tensors.values() if "_exps" not in raw.name]
    halves = ("attn_k_b", "attn_v_b")
    return sum(2 * math.prod(t.shape) if any(h in t.name for h in halves) else size(t) for t in dense)


def device(made: Plan, name: str) -> Any:
    return next(found for found in made.devices if found.name == name)
