"""Random packed matrices with gguf-py as the judge of their values, and comparisons.

Shapes are tiny: the interpreter takes some 0.1 ms an operation and program.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import torch
from torch import Tensor

from isthmus import native
from isthmus.formats.spec import by_name
from isthmus.gpu.tiles import PackedMatrix
from isthmus.native import ops

# Bytes of a block that hold fp16 scales, and factors that give weights a mean near zero.
_SCALES = {"q8_0": {0: 1.0}, "q4_k": {0: 1.0, 2: 7.5}, "q5_k": {0: 1.0, 2: 15.5}, "q6_k": {208: 1.0}}


@dataclass(frozen=True)
class Weight:
    """packed: the CPU's tiles as the kernels get them; values: fp32 [experts, rows, columns] by gguf-py."""

    packed: PackedMatrix
    values: Tensor

    def product(self, x: Tensor, expert: int = 0) -> Tensor:
        """W x in float64."""
        return x.double() @ self.values[expert].double().T


def random_weight(name: str, rows: int, columns: int, *, experts: int = 1, seed: int = 0) -> Weight:
    """Random bits with scales of a size that gives weights near columns^-0.5; packed by the CPU core."""
    spec, rng = by_name(name), np.random.default_rng(seed)
    blocks = rng.integers(
        0, 256, (experts * rows, columns // spec.block_columns, spec.block_bytes), dtype=np.uint8
    )
    if name == "mxfp4":  # an exponent; the values it multiplies have an rms of 5.3
        exponent = round(np.log2(columns**-0.5 / 5.3)) + 128
        blocks[:, :, 0] = rng.integers(exponent - 1, exponent + 2, blocks.shape[:2])
    for at, factor in _SCALES.get(name, {}).items():
        unit = {"q8_0": 2**-6, "q4_k": 2**-8, "q5_k": 2**-9, "q6_k": 2**-11}[name] * columns**-0.5
        scales = (unit * factor * rng.uniform(0.5, 2, blocks.shape[:2])).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    data = blocks.reshape(experts * rows, -1)
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()])
    packed = native.pack(data.reshape(-1), spec.ggml_id, experts, rows, columns)
    tiles = PackedMatrix.from_tiles(ops.memory(packed), spec.ggml_id, experts, rows, columns, "cpu")
    return Weight(tiles, torch.from_numpy(values).view(experts, rows, columns))


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bf16(*shape: int, seed: int) -> Tensor:
    return randn(*shape, seed=seed, dtype=torch.bfloat16)


def strided(x: Tensor, extra: int = 4) -> Tensor:
    """The same rows inside wider ones, among NaN: an operator that reads past a row shows it."""
    wide = torch.full((x.shape[0], x.shape[1] + extra), float("nan"), dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())
