"""How near one row times a matrix far larger than the caches comes to the limits, format by format.

    python benches/gemv.py [FORMAT ...]

The limits: reading as many bytes, and unpacking as many from the second cache.
"""

from __future__ import annotations

import sys

from common import Product, beside, packed, read_limit, report, rows_of, unpack_limit
from isthmus.formats.spec import FORMATS

COLUMNS = 2048
MATRIX_BYTES = 256 << 20


def run(name: str) -> None:
    weight = packed(name, rows_of(name, MATRIX_BYTES, COLUMNS), COLUMNS)
    product = Product([weight], 1, exact=True)
    limits = [read_limit(), unpack_limit(name, COLUMNS, 1)]
    report(bench="gemv", format=name, **beside(limits, product, weight.nbytes, product.flop))


def main() -> None:
    for name in sys.argv[1:] or [s.name for s in FORMATS.values() if s.runnable]:
        run(name)


if __name__ == "__main__":
    main()
