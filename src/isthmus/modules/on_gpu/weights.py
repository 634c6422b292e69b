"""Weights in a device's memory, and the product with them.

A matrix in a format that the kernels unpack is there as the CPU's tiles, and one whose values Q8_0 holds
exactly as tiles of that. Any other is plain: F32 stays fp32, all else becomes bf16 (what
`placement.sizes.gpu_bytes` counts; an F16 one loses 3 bits of its 11).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from isthmus.formats.spec import AS_Q8_0, by_name
from isthmus.gpu.fp8 import Fp8Matrix, product_fp8
from isthmus.gpu.tiles import GPU_FORMATS, PackedMatrix
from isthmus.modules.experts import Matrices
from isthmus.modules.loader import Loader
from isthmus.modules.on_gpu.target import Target
from isthmus.native import ops
from isthmus.weights.source import RawTensor

# Of a file. A Tensor: bf16 or fp32 [rows, columns], or [experts, rows, columns].
Uploaded: TypeAlias = PackedMatrix | Tensor
Weight: TypeAlias = Uploaded | Fp8Matrix  # FP8: of a checkpoint, see modules/fp8.py
# Of gate, up and down, fp32 [experts, rows], or [rows] of one of them.
Biases: TypeAlias = tuple[Tensor, Tensor, Tensor]


def upload(loader: Loader, raw: RawTensor, target: Target) -> Uploaded:
    """[rows, columns] or [experts, rows, columns] on the device; once, however many modules there use it."""
    return loader.once((raw.name, target), lambda: _upload(loader, raw, target))


def upload_plain(loader: Loader, raw: RawTensor, target: Target) -> Tensor:
    """The same values without blocks, in the tensor's shape."""
    dtype = torch.float32 if raw.format.name == "f32" else torch.bfloat16
    return loader.values(raw, dtype).to(target.device)


def upload_f32(loader: Loader, raw: RawTensor, target: Target) -> Tensor:
    """The router's: its product is fp32 whatever the file holds."""
    return loader.values(raw, torch.float32).to(target.device)


def upload_vector(loader: Loader, raw: RawTensor, target: Target) -> Tensor:
    return loader.vector(raw).to(target.device)


def upload_biases(loader: Loader, matrices: Matrices, target: Target) -> Biases | None:
    """Of experts whose matrices have one."""
    gate, up, down = (
        upload_vector(loader, raw.aux["bias"], target).view(raw.shape[:-1]) if "bias" in raw.aux else None
        for raw in matrices
    )
    if gate is None or up is None or down is None:
        return None
    return gate, up, down


def stays_packed(raw: RawTensor) -> bool:
    """Whether the kernels multiply by the tensor in blocks; they know no factor beside the tiles."""
    return raw.format.name in (*GPU_FORMATS, *AS_Q8_0) and "scale" not in raw.aux


def product(
    target: Target,
    x: Tensor,
    weight: Weight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """out = W x + bias + residual, summed in fp32 and rounded once.

    x: bf16 or fp32 [T, K], rounded to bf16 unless W is fp32, or FP8 (gpu/fp8.py); out, residual: bf16 or fp32
    [T, N], rows may be strided; bias: fp32 [N].
    """
    if isinstance(weight, PackedMatrix):
        x = x.to(torch.bfloat16)
        packed: Tensor = target.kernels.linear(x, weight, out, bias=bias, residual=residual)
        return packed
    y = product_fp8(x, weight) if isinstance(weight, Fp8Matrix) else target.kernels.product_f32(x, weight)
    if bias is not None:
        y += bias
    if residual is not None:
        y += residual
    return out.copy_(y)


def _upload(loader: Loader, raw: RawTensor, target: Target) -> Uploaded:
    if not stays_packed(raw):
        return upload_plain(loader, raw, target)
    if raw.format.name in AS_Q8_0:
        return _upload_as_q8_0(loader, raw, target)
    packed = loader.pack_once(raw)
    sizes = (packed.experts, packed.rows, packed.columns)
    return PackedMatrix.from_tiles(ops.memory(packed), raw.format.ggml_id, *sizes, target.device)


def _upload_as_q8_0(loader: Loader, raw: RawTensor, target: Target) -> Uploaded:
    experts, rows, columns = (1, *raw.shape)[-3:]
    out = PackedMatrix.empty("q8_0", experts, rows, columns, target.device)
    for expert, packed in enumerate(loader.pack_as_q8_0(raw)):
        tiles = ops.memory(packed)
        one = PackedMatrix.from_tiles(tiles, by_name("q8_0").ggml_id, 1, rows, columns, target.device)
        out.expert(expert).data.copy_(one.data)
    return out
