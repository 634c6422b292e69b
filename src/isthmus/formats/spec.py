"""Every tensor type id of ggml, with its block size: the one place where Python knows them.

Names are ggml's own in lower case, ids are those of a GGUF tensor header. A format is `runnable` when the
CPU core multiplies by it today; otherwise `reason` says why not and what to do. Removed ids have no block any
more: a file that uses one is refused when it is opened. Knows nothing about files, bits or devices, and
imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class FormatSpec:
    """A row of K columns is K / block_columns blocks of block_bytes, one after the other."""

    name: str
    ggml_id: int
    block_columns: int
    block_bytes: int
    runnable: bool = False
    removed: bool = False
    reason: str = ""

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row; `columns` must be a multiple of `block_columns` (ValueError)."""
        if columns < 1 or columns % self.block_columns:
            raise ValueError(
                f"{self.name} rows are blocks of {self.block_columns} columns, got {columns} columns"
            )
        return columns // self.block_columns * self.block_bytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_columns


def by_name(name: str) -> FormatSpec:
    """The format called `name`, in any case; KeyError lists the known ones."""
    try:
        return _BY_NAME[name.lower()]
    except KeyError:
        known = ", ".join(spec.name for spec in FORMATS.values() if spec.block_bytes)
        raise KeyError(f"no tensor format is called {name!r}; known are {known}") from None


def cannot_run(tensors: Iterable[tuple[str, FormatSpec]]) -> list[str]:
    """Of tensors by name, one line for each type that cannot run: which have it, and why."""
    found: dict[FormatSpec, list[str]] = {}
    for tensor, spec in tensors:
        if not spec.runnable:
            found.setdefault(spec, []).append(tensor)
    lines = []
    for spec, names in found.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        reason = spec.reason or f"{spec.name} is no type that is known here"
        lines.append(f"tensor {names[0]}{more} cannot run: {reason}")
    return lines


def _runnable(ggml_id: int, name: str, columns: int, block_bytes: int) -> FormatSpec:
    return FormatSpec(name, ggml_id, columns, block_bytes, runnable=True)


def _no_weight(ggml_id: int, name: str, columns: int, block_bytes: int, what: str) -> FormatSpec:
    reason = f"{name} holds {what}, not weights; convert the tensor to F32 or a quantised type"
    return FormatSpec(name, ggml_id, columns, block_bytes, reason=reason)


def _removed(ggml_id: int, name: str, instead: str) -> FormatSpec:
    reason = f"{name} was removed from the GGUF format; convert to {instead}"
    return FormatSpec(name, ggml_id, 1, 0, removed=True, reason=reason)


_ACTIVATIONS = "activations inside an engine"

# Block bytes: the structs of ggml-common.h. q8_1 is two fp16 + 32 codes there; gguf-py 0.19 says 40.
_ALL: Iterable[FormatSpec] = (
    _runnable(0, "f32", 1, 4),
    _runnable(1, "f16", 1, 2),
    _runnable(2, "q4_0", 32, 18),
    _runnable(3, "q4_1", 32, 20),
    _removed(4, "q4_2", "Q4_0"),
    _removed(5, "q4_3", "Q4_1"),
    _runnable(6, "q5_0", 32, 22),
    _runnable(7, "q5_1", 32, 24),
    _runnable(8, "q8_0", 32, 34),
    _no_weight(9, "q8_1", 32, 36, _ACTIVATIONS),
    _runnable(10, "q2_k", 256, 84),
    _runnable(11, "q3_k", 256, 110),
    _runnable(12, "q4_k", 256, 144),
    _runnable(13, "q5_k", 256, 176),
    _runnable(14, "q6_k", 256, 210),
    _no_weight(15, "q8_k", 256, 292, _ACTIVATIONS),
    _runnable(16, "iq2_xxs", 256, 66),
    _runnable(17, "iq2_xs", 256, 74),
    _runnable(18, "iq3_xxs", 256, 98),
    _runnable(19, "iq1_s", 256, 50),
    _runnable(20, "iq4_nl", 32, 18),
    _runnable(21, "iq3_s", 256, 110),
    _runnable(22, "iq2_s", 256, 82),
    _runnable(23, "iq4_xs", 256, 136),
    _no_weight(24, "i8", 1, 1, "integers"),
    _no_weight(25, "i16", 1, 2, "integers"),
    _no_weight(26, "i32", 1, 4, "integers"),
    _no_weight(27, "i64", 1, 8, "integers"),
    _no_weight(28, "f64", 1, 8, "64-bit floats"),
    _runnable(29, "iq1_m", 256, 56),
    _runnable(30, "bf16", 1, 2),
    _removed(31, "q4_0_4_4", "Q4_0"),
    _removed(32, "q4_0_4_8", "Q4_0"),
    _removed(33, "q4_0_8_8", "Q4_0"),
    _runnable(34, "tq1_0", 256, 54),
    _runnable(35, "tq2_0", 256, 66),
    _removed(36, "iq4_nl_4_4", "IQ4_NL"),
    _removed(37, "iq4_nl_4_8", "IQ4_NL"),
    _removed(38, "iq4_nl_8_8", "IQ4_NL"),
    _runnable(39, "mxfp4", 32, 17),
    _runnable(40, "nvfp4", 64, 36),
    _runnable(41, "q1_0", 128, 18),
    _runnable(42, "q2_0", 64, 18),
)

# Blocks of 32 that are an fp16 scale, which stands first, times integers of at most 8 bits: Q8_0 holds the
# very same values, in 8.5 bits. So where Q8_0 can be multiplied by, these can.
AS_Q8_0 = ("q4_0", "q5_0", "iq4_nl")

FORMATS: dict[int, FormatSpec] = {spec.ggml_id: spec for spec in _ALL}
_BY_NAME: dict[str, FormatSpec] = {spec.name: spec for spec in _ALL}
