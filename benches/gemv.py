"""How near one row times a matrix far larger than the caches comes to the read limit, format by format.

python benches/gemv.py [FORMAT ...]
"""

from __future__ import annotations

import sys

import numpy as np

from common import packed, pairs, report
from isthmus import native

FORMATS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "bf16", "f16", "f32"]
COLUMNS = 2048
MATRIX_BYTES = 512 << 20


def main() -> None:
    x = np.random.default_rng(1).standard_normal((1, COLUMNS), dtype=np.float32)
    for name in sys.argv[1:] or FORMATS:
        row_bytes = packed(name, 16, COLUMNS).nbytes // 16
        rows = MATRIX_BYTES // row_bytes // 16 * 16
        weight = packed(name, rows, COLUMNS)
        out = np.empty((1, rows), np.float32)
        linear = native.Linear([weight], exact=True)

        def work(linear: native.Linear = linear, out: np.ndarray = out, rows: int = rows) -> None:
            linear(x.ctypes.data, 1, COLUMNS, out.ctypes.data, rows)

        report(bench="gemv", format=name, **pairs(work, weight.nbytes, 2 * rows * COLUMNS))


if __name__ == "__main__":
    main()
