"""Matrices of FP8 and products with them, by torch.

W = codes * scales: e4m3 codes, and fp32 scales of one value for a block of 128 x 128 (as DeepSeek-V3 is
published, `weight_scale_inv`), a row, or the whole matrix. Two products:

    scaled        x is rounded to e4m3 too, with a scale a row (and 128 columns, where W has blocks), as FP8
                  checkpoints are meant to be run; torch._scaled_mm multiplies on FP8 tensor cores. From
                  compute capability 8.9 on; with blocks where torch says it can (9.0). x's 4 significant bits
                  cost some 2.6 % of the product's norm
    dequantised   W becomes bf16 in pieces: everywhere else, and for sizes that are no multiples of 16, with
                  blocks for columns that are no multiples of four of them
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from isthmus.gpu.plain import product_f32

log = logging.getLogger(__name__)

BLOCK = 128
FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3
_ROWS = 16  # of x, and multiples: what its scales of 128 columns are aligned to
_PIECE_VALUES = 1 << 27  # dequantised at a time: 256 MiB, which a plan sets aside


@dataclass(frozen=True)
class Fp8Matrix:
    """W [N, K]: codes float8_e4m3fn [N, K], contiguous; scales fp32 [1, 1], [N, 1] or [N / 128, K / 128],
    rounded up, on the same device."""

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if self.codes.dtype != FP8 or self.codes.dim() != 2 or not self.codes.is_contiguous():
            raise ValueError(f"codes are {self.codes.dtype} {tuple(self.codes.shape)}; need {FP8} [N, K]")
        n, k = self.codes.shape
        allowed = [(1, 1), (n, 1), (blocks_of(n), blocks_of(k))]
        if self.scales.dtype != torch.float32 or self.scales.shape not in allowed:
            shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(allowed))
            raise ValueError(
                f"scales of [{n}, {k}] are {self.scales.dtype} {list(self.scales.shape)}; need float32, one "
                f"of {shapes}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def has_blocks(self) -> bool:
        return self.scales.shape not in ((1, 1), (len(self.codes), 1))

    def to(self, device: torch.device) -> Fp8Matrix:
        return Fp8Matrix(self.codes.to(device), self.scales.to(device))

    def values(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Some rows, from a multiple of 128 on, as fp32 products rounded to `dtype`."""
        codes, scales = self.codes[rows], self.scales
        if self.has_blocks:
            first, last = (rows.start or 0) // BLOCK, blocks_of(rows.stop or len(self.codes))
            scales = scales[first:last].repeat_interleave(BLOCK, 0)[: len(codes)]
            scales = scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
        elif len(scales) > 1:
            scales = scales[rows]
        return (codes.float() * scales).to(dtype)


def blocks_of(size: int) -> int:
    return -(-size // BLOCK)


def product_fp8(x: Tensor, weight: Fp8Matrix) -> Tensor:
    """W x, a new fp32 [T, N], by whichever of the two can be. x: bf16 or fp32 [T, K]."""
    return scaled(x, weight) if can_scale(weight) else dequantised(x, weight)


def can_scale(weight: Fp8Matrix) -> bool:
    """Whether torch._scaled_mm multiplies by such a matrix on its device."""
    device = weight.codes.device
    if any(size % 16 for size in weight.shape) or (weight.has_blocks and blocks_of(weight.shape[1]) % 4):
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return False
    return device.type in ("cpu", "cuda") and _takes(device, weight.has_blocks)


def scaled(x: Tensor, weight: Fp8Matrix) -> Tensor:
    """x rounded to e4m3; sums in fp32, on CUDA rounded to bf16."""
    (n, k), rows = weight.shape, len(x)
    whole = torch.nn.functional.pad(x, (0, 0, 0, -rows % _ROWS))
    codes, of_x = rounded(whole, BLOCK if weight.has_blocks else k)
    if weight.has_blocks:  # cuBLAS wants x's scales with rows side by side, W's as they are
        of_x, of_w = of_x.T.contiguous().T, weight.scales.T
    else:
        of_w = weight.scales.expand(n, 1).T.contiguous()
    product: Tensor = torch._scaled_mm(
        codes, weight.codes.T, scale_a=of_x, scale_b=of_w, out_dtype=torch.bfloat16
    )
    return product[:rows].float()


def dequantised(x: Tensor, weight: Fp8Matrix) -> Tensor:
    n, k = weight.shape
    out = torch.empty(len(x), n, dtype=torch.float32, device=x.device)
    step = max(BLOCK, _PIECE_VALUES // k // BLOCK * BLOCK)
    for begin in range(0, n, step):
        rows = slice(begin, min(begin + step, n))
        out[:, rows] = product_f32(x, weight.values(torch.bfloat16, rows))
    return out


def rounded(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(e4m3 codes [T, K], fp32 scales [T, K / columns, rounded up]) of x [T, K]: the largest value of each
    `columns` neighbours becomes the format's largest."""
    tokens, k = x.shape
    groups = -(-k // columns)
    wide = torch.nn.functional.pad(x.float(), (0, groups * columns - k)).view(tokens, groups, columns)
    scales = wide.abs().amax(-1) / _LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (wide / scales[..., None]).clamp(-_LARGEST, _LARGEST).to(FP8)
    return codes.view(tokens, -1)[:, :k].contiguous(), scales


@cache
def _takes(device: torch.device, has_blocks: bool) -> bool:
    """Tried on a matrix of ones: versions of torch and cards differ in which scales they know. What is not
    taken is said, once."""
    size = 4 * BLOCK
    ones = torch.ones(size, size, device=device).to(FP8)
    scales = torch.ones(4, 4, device=device) if has_blocks else torch.ones(1, 1, device=device)
    try:
        product = scaled(torch.ones(16, size, device=device), Fp8Matrix(ones, scales))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = str(error).strip().partition("\n")[0]
    else:
        if bool((product == size).all()):
            return True
        why = f"a sum of {size} ones is {float(product.flatten()[0]):g}"
    what = "blocks of 128 x 128" if has_blocks else "rows"
    log.warning(
        "FP8 weights with scales of %s become bf16 in pieces on %s for each product: torch._scaled_mm of "
        "torch %s does not take them there (%s)",
        what,
        device,
        torch.__version__,
        why,
    )
    return False
