"""Typed wrappers of what multiplies by packed weights, and of threads and instruction sets.

An operator is made once from its weights, where shapes and formats are checked; a call passes addresses
(`tensor.data_ptr()`) and counts, and trusts them: the caller keeps the memory alive, contiguous fp32 unless
said otherwise. Calls may come from any Python thread; they run one after the other and release the
interpreter's lock. Every mismatch is a ValueError, raised before memory is touched. Nothing here knows torch
or files.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from isthmus.native import _native
from isthmus.native._native import (
    MappedFile,
    PackedWeight,
    ReadProbe,
    Topology,
    WatchedRange,
    checksum,
    current_isa,
    expert_reads,
    isa_names,
    layout_id,
    node_bytes,
    num_nodes,
    num_threads,
    set_threads,
    this_machine,
    use_isa,
)

__all__ = [
    "Act",
    "Experts",
    "HeadLinear",
    "Linear",
    "MappedFile",
    "PackedWeight",
    "ReadProbe",
    "Topology",
    "WatchedRange",
    "checksum",
    "checksum_of",
    "copy_bias",
    "copy_expert",
    "copy_seconds",
    "current_isa",
    "expert_reads",
    "isa_names",
    "layout_id",
    "memory",
    "multiply_gops",
    "node_bytes",
    "num_nodes",
    "num_threads",
    "pack",
    "packed_over",
    "read_gb_s",
    "set_threads",
    "this_machine",
    "use_isa",
    "watch",
]

Source: TypeAlias = memoryview | bytes | bytearray | npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Act:
    """The activation of an FFN: act(gate) * up.

    limit > 0 clamps as gate <= limit and |up| <= limit before the product. "gelu" is the tanh approximation;
    "swiglu_oai" gpt-oss's gate * sigmoid(1.702 gate) * (up + 1).
    """

    kind: Literal["silu", "gelu", "swiglu_oai"] = "silu"
    limit: float = 0.0

    @property
    def for_kernels(self) -> dict[str, Any]:
        """As the kernels of other devices take it."""
        return {"activation": self.kind, "limit": self.limit}


def pack(
    data: Source | tuple[int, int], format_id: int, experts: int, rows: int, columns: int
) -> PackedWeight:
    """Packs W[experts][rows, columns] into tiles, in parallel over the pool.

    data: the tensor's bytes as a GGUF file holds them (read-only is fine; not kept), or (address, nbytes).
    format_id: ggml's type id. Raises ValueError if there are no kernels for the format, columns are not a
    multiple of its block, the bytes are not exactly what the sizes give, or a block's scale is Inf or NaN
    (named by expert, row and block); MemoryError.
    """
    if isinstance(data, tuple):
        address, nbytes = data
    else:
        view = np.frombuffer(data, dtype=np.uint8)  # keeps `data` alive over the call
        address, nbytes = view.ctypes.data, view.nbytes
    return _native.pack(address, nbytes, format_id, experts, rows, columns)


def packed_over(
    address: int, nbytes: int, format_id: int, experts: int, rows: int, columns: int
) -> PackedWeight:
    """Tiles at `address`, which the caller keeps, and may write while nobody computes: see copy_expert."""
    return _native.packed_over(address, nbytes, format_id, experts, rows, columns)


def copy_expert(packed: PackedWeight, expert: int, address: int) -> None:
    """Writes an expert's tiles, packed.nbytes // packed.experts bytes, as they are. By the calling thread."""
    packed.expert_tiles(expert, address)


def copy_bias(packed: PackedWeight, expert: int, address: int) -> None:
    """The same of its bias, fp32 [packed.rows]. Raises ValueError for weights without one."""
    packed.expert_bias(expert, address)


def memory(packed: PackedWeight) -> memoryview:
    """All tiles, read-only uint8 [packed.nbytes], valid while `packed` lives; a copy if several nodes have
    them."""
    if packed.address == 0:
        return memoryview(packed.tiles())
    return memoryview((ctypes.c_uint8 * packed.nbytes).from_address(packed.address)).cast("B").toreadonly()


def checksum_of(data: memoryview) -> int:
    """64 bits of any bytes, at memory speed."""
    view = np.frombuffer(data, dtype=np.uint8)
    return checksum(view.ctypes.data, view.nbytes)


def copy_seconds(data: Source) -> float:
    """Seconds that all threads take to copy the bytes into fresh memory."""
    view = np.frombuffer(data, dtype=np.uint8)
    return _native.copy_seconds(view.ctypes.data, view.nbytes)


def watch(data: Source) -> WatchedRange:
    """Watches memory mapped from a file while the result lives: if the file shrinks, the lost part reads as
    zeros and `lost` becomes true, where the process would have ended with SIGBUS."""
    view = np.frombuffer(data, dtype=np.uint8)
    return WatchedRange(view.ctypes.data, view.nbytes)


class Linear:
    """out = [W_0 x + b_0 | W_1 x + b_1 | ...] (+ residual): outputs side by side, x quantised once.

    weights: single matrices (experts == 1) over the same columns K; formats may differ. biases: one entry per
    weight, an address of N floats that outlives the operator, or None; the empty default means none at all.
    exact: one driver for every row count, so a row's result never depends on the rows beside it.
    """

    __slots__ = ("_op", "columns", "width")

    def __init__(
        self, weights: Sequence[PackedWeight], biases: Sequence[int | None] = (), exact: bool = False
    ) -> None:
        addresses = [bias or 0 for bias in biases] or [0] * len(weights)
        self._op = _native.Linear(list(weights), addresses, exact)
        self.columns: int = self._op.columns  # K
        self.width: int = self._op.width  # sum of N

    def __call__(
        self,
        x_address: int,
        rows: int,
        x_stride: int,
        out_address: int,
        out_stride: int,
        residual_address: int = 0,
    ) -> None:
        """x: [rows, K]; out: [rows, width]; strides in floats between rows.

        residual: [rows, width] with out's stride, added last; may be out itself. x and out must not overlap.
        """
        self._op(x_address, rows, x_stride, out_address, out_stride, residual_address)


class HeadLinear:
    """out[t, h, :] = W[h] x[t, h, :], the heads being the weight's experts (MLA's k_b and v_b)."""

    __slots__ = ("_op", "columns", "heads", "rows")

    def __init__(self, weights: PackedWeight, exact: bool = False) -> None:
        self._op = _native.HeadLinear(weights, exact)
        self.heads, self.rows, self.columns = weights.experts, weights.rows, weights.columns

    def __call__(
        self,
        x_address: int,
        rows: int,
        x_row_stride: int,
        x_head_stride: int,
        out_address: int,
        out_row_stride: int,
        out_head_stride: int,
    ) -> None:
        """Strides in floats; x[t, h] has `columns` floats, out[t, h] the weight's `rows`. No overlap."""
        self._op(x_address, rows, x_row_stride, x_head_stride, out_address, out_row_stride, out_head_stride)


class Experts:
    """y[t] = sum_j weights[t, j] * down(act(gate x) * up x) of expert ids[t, j], + shared expert, + residual.

    gate, up: [E][F, H], down: [E][H, F]; the three may differ in format. shared: the same three, E = 1 and
    any F: an expert that every token visits. Each product is of a weight with its factor and bias, see
    PackedWeight. The sum is in fp32, in the order of ids, then shared, then residual. A dense FFN is one
    expert. exact: as for Linear.
    """

    __slots__ = ("_op", "hidden", "num_experts")

    def __init__(
        self,
        gate: PackedWeight,
        up: PackedWeight,
        down: PackedWeight,
        shared: tuple[PackedWeight, PackedWeight, PackedWeight] | None = None,
        act: Act | None = None,
        exact: bool = False,
    ) -> None:
        act = act or Act()
        kinds = {"silu": 0, "gelu": 1, "swiglu_oai": 2}
        if act.kind not in kinds:
            raise ValueError(f"act must be one of {', '.join(kinds)}, got {act.kind!r}")
        shared_gate, shared_up, shared_down = shared or (None, None, None)
        self._op = _native.Experts(
            gate, up, down, shared_gate, shared_up, shared_down, kinds[act.kind], act.limit, exact
        )
        self.num_experts, self.hidden = gate.experts, gate.columns

    def __call__(
        self,
        x_address: int,
        tokens: int,
        ids_address: int,
        weights_address: int,
        k: int,
        shared_weights_address: int,
        out_address: int,
        residual_address: int = 0,
    ) -> None:
        """x, out, residual: [tokens, H]; out may be x or residual.

        ids: int32 [tokens, k], -1 for a choice that somebody else computes, which costs nothing here (0:
        every token to expert 0, k = 1); weights: [tokens, k] (0: ones); shared_weights: [tokens] (0: ones).
        Raises ValueError, with out untouched, if an id is not an expert.
        """
        self._op(
            x_address,
            tokens,
            ids_address,
            weights_address,
            k,
            shared_weights_address,
            out_address,
            residual_address,
        )


def multiply_gops(policy: Literal["int8", "bf16"], seconds: float) -> float:
    """Operations per nanosecond (2 a multiply-add) of the current instruction set's inner loop alone.

    All threads, operands in the first cache, nothing unpacked or stored: the limit of a GEMM with that
    policy. Without a matrix unit bf16 products are fp32 fma, and so is their limit.
    """
    return _native.multiply_gops(policy, seconds)


def read_gb_s(nbytes: int, threads: int, seconds: float) -> float:
    """Bytes per nanosecond that `threads` threads read from a buffer of `nbytes`, over at least `seconds`.

    Makes and drops the buffer: to alternate slices of measurement with work, keep a ReadProbe. Sets the
    pool's threads for the time of the measurement.
    """
    before = num_threads()
    if threads != before:
        set_threads(threads)
    try:
        return ReadProbe(nbytes).run(seconds)
    finally:
        if threads != before:
            set_threads(before)
