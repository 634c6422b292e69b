"""GPUs by name: what their makers publish, for plans of machines that are elsewhere.

Also the rate of products of a GPU that is here, which no driver tells.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace

from isthmus.errors import UsageError
from isthmus.placement.nvidia import Gpu

GIB = 1 << 30
# Of a card's nominal memory: what firmware and page tables leave, then what a driver and a desktop hold.
_USABLE, _HELD_BYTES = 0.98, 400 << 20

# Name -> (GiB, memory GB/s, TFLOPS of bf16 products with fp32 sums and without sparsity, compute capability,
# PCIe generation, lanes). From NVIDIA's architecture papers and data sheets; GeForce cards sum in fp32 at
# half their rate in fp16.
GPUS: dict[str, tuple[int, int, float, str, int, int]] = {
    "rtx3060": (12, 360, 25.5, "8.6", 4, 16),
    "rtx3070": (8, 448, 40.6, "8.6", 4, 16),
    "rtx3080": (10, 760, 59.5, "8.6", 4, 16),
    "rtx3080ti": (12, 912, 68.2, "8.6", 4, 16),
    "rtx3090": (24, 936, 71.2, "8.6", 4, 16),
    "rtx3090ti": (24, 1008, 80.0, "8.6", 4, 16),
    "rtx4060": (8, 272, 30.2, "8.9", 4, 8),
    "rtx4060ti": (16, 288, 44.1, "8.9", 4, 8),
    "rtx4070": (12, 504, 58.3, "8.9", 4, 16),
    "rtx4070super": (12, 504, 71.0, "8.9", 4, 16),
    "rtx4070ti": (12, 504, 80.2, "8.9", 4, 16),
    "rtx4070tisuper": (16, 672, 88.2, "8.9", 4, 16),
    "rtx4080": (16, 717, 97.5, "8.9", 4, 16),
    "rtx4080super": (16, 736, 104.4, "8.9", 4, 16),
    "rtx4090": (24, 1008, 165.2, "8.9", 4, 16),
    "rtx4090d": (24, 1008, 147.1, "8.9", 4, 16),
    "rtx5060ti": (16, 448, 47.4, "12.0", 5, 8),
    "rtx5070": (12, 672, 61.7, "12.0", 5, 16),
    "rtx5070ti": (16, 896, 87.9, "12.0", 5, 16),
    "rtx5080": (16, 960, 112.6, "12.0", 5, 16),
    "rtx5090": (32, 1792, 209.5, "12.0", 5, 16),
    "rtxa4000": (16, 448, 76.7, "8.6", 4, 16),
    "rtxa5000": (24, 768, 111.1, "8.6", 4, 16),
    "rtxa6000": (48, 768, 154.8, "8.6", 4, 16),
    "rtx6000ada": (48, 960, 364.2, "8.9", 4, 16),
    "rtxpro6000": (96, 1792, 503.8, "12.0", 5, 16),
    "a10": (24, 600, 125.0, "8.6", 4, 16),
    "a40": (48, 696, 149.7, "8.6", 4, 16),
    "a100-40gb": (40, 1555, 312.0, "8.0", 4, 16),
    "a100-80gb": (80, 1935, 312.0, "8.0", 4, 16),
    "l4": (24, 300, 121.0, "8.9", 4, 16),
    "l20": (48, 864, 119.5, "8.9", 4, 16),
    "l40": (48, 864, 181.0, "8.9", 4, 16),
    "l40s": (48, 864, 362.0, "8.9", 4, 16),
    "h20": (96, 4000, 148.0, "9.0", 5, 16),
    "h100-pcie": (80, 2000, 756.0, "9.0", 5, 16),
    "h100": (80, 3350, 989.0, "9.0", 5, 16),
    "h200": (141, 4800, 989.0, "9.0", 5, 16),
    "b200": (180, 8000, 2250.0, "10.0", 5, 16),
}
_MAX_GPUS = 16


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """`rtx4090`, `2xrtx3090`, `rtx4090,rtx3060`; `none`. UsageError with the nearest names for another."""
    found: list[Gpu] = []
    for word in text.lower().split(",") if text.lower() != "none" else ():
        match = re.fullmatch(r"(?:(\d{1,2})x)?(.+)", word.strip())
        if match is None:
            raise UsageError(f"--gpu must be a name such as rtx4090, 2xrtx3090, or none, got {text!r}")
        found += [named_gpu(match[2], len(found) + i) for i in range(int(match[1] or 1))]
    if len(found) > _MAX_GPUS:
        raise UsageError(f"--gpu names {len(found)} GPUs; at most {_MAX_GPUS} are planned for")
    return tuple(found)


def named_gpu(name: str, index: int = 0) -> Gpu:
    """The GPU as it would be found in a machine with nothing else on it."""
    known = _plain(name)
    if known not in GPUS:
        near = difflib.get_close_matches(known, GPUS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(GPUS)}"
        raise UsageError(f"no GPU is called {name!r}: {hint}; any other can be described with --machine FILE")
    gib, memory_gb_s, tflops, capability, generation, width = GPUS[known]
    total = round(gib * GIB * _USABLE)
    free = total - _HELD_BYTES
    return Gpu(index, known, total, free, capability, generation, width, 0.0, memory_gb_s, tflops)


def with_published_rate(gpu: Gpu) -> Gpu:
    """A GPU that a driver described, with its rate of products from the table if it is there by name."""
    known = _plain(gpu.name)
    if gpu.bf16_tflops or known not in GPUS:
        return gpu
    return replace(gpu, bf16_tflops=GPUS[known][2])


def _plain(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` -> rtx4090; `NVIDIA A100-SXM4-80GB` -> a100-80gb; others stay."""
    keys = {key.replace("-", ""): key for key in GPUS}
    plain = re.sub(r"nvidia|geforce|generation|workstation|server|edition|blackwell|[\s_-]", "", name.lower())
    plain = re.sub(r"sxm\d?|hbm\d?e?", "", plain)
    for attempt in (plain, plain.replace("pcie", ""), re.sub(r"(pcie)?\d+gb$", "", plain)):
        if attempt in keys:
            return keys[attempt]
    return name.lower()
