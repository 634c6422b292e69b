"""Weights of FP8 as checkpoints have them: a tensor of float8_e4m3fn, and one of scales beside it.

    NAME.weight             float8_e4m3fn [N, K], or of experts [E, N, K]
    NAME.weight_scale_inv   float32 [N / 128, K / 128] rounded up: DeepSeek-V3's; what it is the inverse of
    or NAME.weight_scale    is the factor that was divided by. Also [N], [N, 1], [1] or []; of experts with
                            [E, .. in front

A device multiplies by such a matrix (gpu/fp8.py). The CPU has no FP8 products: there its values are packed
anew, each expert by itself, in a format that this module can round to.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isthmus.errors import MalformedFileError, UsageError
from isthmus.formats.spec import FormatSpec
from isthmus.gpu.fp8 import FP8, Fp8Matrix
from isthmus.weights.memory import MEMORY
from isthmus.weights.source import RawTensor

SCALES = (".weight_scale_inv", ".weight_scale")
PACKED_AS = ("q8_0", "bf16", "f32")

_Q8_0_LARGEST = 127
_F16_LARGEST = 65504.0


def without_fp8(
    weights: Mapping[str, Tensor | RawTensor], stays: str | None, spec: FormatSpec
) -> tuple[dict[str, Tensor | RawTensor], dict[str, Fp8Matrix], tuple[str, ...]]:
    """(the tensors without FP8, the matrices that stay so, names of those packed anew, as `spec`).

    stays: what the names of matrices have that stay. Raises MalformedFileError that names the tensor: scales
    that are missing, of another shape or not finite, codes that are NaN, values beyond the format's;
    UsageError for another format.
    """
    rest, fp8, anew = dict(weights), {}, []
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor) or tensor.dtype != FP8:
            continue
        del rest[name]
        matrices = _matrices(name, tensor.detach(), _scales_of(name, rest))
        if stays is not None and stays in name and tensor.dim() == 2:
            fp8[name] = matrices[0]
        else:
            rest[name] = _packed_anew(name, matrices, tuple(tensor.shape), spec)
            anew.append(name)
    return rest, fp8, tuple(anew)


def _packed_anew(name: str, matrices: list[Fp8Matrix], shape: tuple[int, ...], spec: FormatSpec) -> RawTensor:
    """Their values in a format of PACKED_AS, as a tensor of a file would be."""
    if spec.name not in PACKED_AS:
        raise UsageError(
            f"{name} is FP8, which the CPU does not multiply by; its values can be packed as "
            f"{', '.join(PACKED_AS)}, not as {spec.name}: give one of these as weight_format"
        )
    columns = matrices[0].shape[1]
    if columns % spec.block_columns:
        raise UsageError(
            f"{spec.name} needs rows in multiples of {spec.block_columns}; those of {name} have {columns}"
        )
    data = b"".join(_packed(name, matrix.values(torch.float32).cpu(), spec) for matrix in matrices)
    return RawTensor(name, shape, spec, memoryview(data), MEMORY)


def _scales_of(name: str, rest: dict[str, Tensor | RawTensor]) -> Tensor:
    stem = name.removesuffix(".weight")
    for ending in SCALES:
        scales = rest.pop(stem + ending, None)
        if isinstance(scales, Tensor):
            return scales.detach()
    needed = " or ".join(stem + ending for ending in SCALES)
    raise MalformedFileError(f"{name} is {FP8} and has no scales: needed is {needed}")


def _matrices(name: str, codes: Tensor, scales: Tensor) -> list[Fp8Matrix]:
    if codes.dim() not in (2, 3):
        raise MalformedFileError(f"{name} is {list(codes.shape)}; a matrix of FP8 has 2 dimensions, or 3")
    if codes.view(torch.uint8).bitwise_and(0x7F).eq(0x7F).any():
        raise MalformedFileError(f"{name} has codes that are NaN")
    if not torch.isfinite(scales.float()).all():
        raise MalformedFileError(f"the scales of {name} are not all finite")
    if codes.dim() == 3 and scales.shape[:1] != codes.shape[:1]:
        raise MalformedFileError(
            f"the scales of {name} are {list(scales.shape)}; needed are those of {len(codes)} experts"
        )
    scales = scales.to(codes.device)
    every = [(codes, scales)] if codes.dim() == 2 else list(zip(codes, scales, strict=True))
    try:
        return [Fp8Matrix(matrix.contiguous(), _by_rows(factors)) for matrix, factors in every]
    except ValueError as error:
        raise MalformedFileError(f"{name}: {error}") from None


def _by_rows(scales: Tensor) -> Tensor:
    """[] and [N] as [1, 1] and [N, 1]."""
    return (scales if scales.dim() == 2 else scales.reshape(-1, 1)).float().contiguous()


def _packed(name: str, values: Tensor, spec: FormatSpec) -> bytes:
    if spec.name == "f32":
        return values.numpy().tobytes()
    if spec.name == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    largest = float(values.abs().max())
    if largest / _Q8_0_LARGEST > _F16_LARGEST:
        raise MalformedFileError(
            f"{name} has values of up to {largest:.3g}, q8_0 holds up to {_Q8_0_LARGEST * _F16_LARGEST:.3g}: "
            "are its scales what codes are multiplied by, not reciprocals? Else give bf16 as weight_format"
        )
    return _q8_0(values.numpy())


def _q8_0(values: npt.NDArray[np.float32]) -> bytes:
    """As ggml rounds: the largest of 32 becomes 127 steps, halves go away from 0."""
    blocks = values.reshape(-1, 32)
    steps = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(_Q8_0_LARGEST)
    with np.errstate(divide="ignore"):
        inverse = np.where(steps == 0, np.float32(0), np.float32(1) / steps)
    turned = blocks * inverse
    size = np.abs(turned)
    codes = np.sign(turned) * (np.floor(size) + np.floor(2 * (size - np.floor(size))))
    return np.concatenate(
        [steps.astype(np.float16).view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1
    ).tobytes()
