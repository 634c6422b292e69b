"""Starting a kernel, and the checks that all wrappers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

# Who wants to see launches instead of having them run: (kernel, arguments, constants, options) of each.
Recorder = Callable[[Any, tuple[Any, ...], dict[str, Any], dict[str, int]], None]
_recorder: Recorder | None = None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int,
    stages: int = 2,
    **constants: Any,
) -> None:
    """Queues kernel[grid](*args, **constants) on the current stream of the tensors' device.

    Numbers that change from step to step are `do_not_specialize` in their kernels: triton would compile
    anew for a 1 or a multiple of 16, in the middle of a run, and a first launch waits for the whole device.

    args: tensors, numbers, or None for a pointer that the constants say is not read. An empty grid is no
    work. Fusing a multiply and an add into one rounding is asked for by name: triton changes its default.
    """
    if 0 in grid:
        return
    options = {"num_warps": warps, "num_stages": stages}
    if _recorder is not None:
        return _recorder(kernel, args, constants, options)
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **constants, **options, enable_fp_fusion=True)
        return
    kernel[grid](*args, **constants, **options, enable_fp_fusion=True)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Launches inside go to `recorder` and do not run: compiling ahead of time sees what wrappers really
    ask."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


def blocks(count: int, size: int) -> int:
    return (count + size - 1) // size


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is no less than both: what a dimension of a block must be."""
    return max(least, int(triton.next_power_of_2(max(n, 1))))


def check(
    name: str, tensor: Tensor, dtypes: torch.dtype | tuple[torch.dtype, ...], *shape: int | None
) -> None:
    """ValueError unless `tensor` has this shape (None: any size) and one of the dtypes, values of its last
    dimension side by side."""
    kinds = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    side_by_side = tensor.dim() == 0 or tensor.shape[-1] < 2 or tensor.stride(-1) == 1
    if not fits or tensor.dtype not in kinds or not side_by_side:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; needs "
            f"{' or '.join(map(str, kinds))} [{wanted}], its last dimension contiguous"
        )


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}; needs contiguous memory"
        )
