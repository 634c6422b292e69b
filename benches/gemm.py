"""How many rows of x it takes to reach the multiply rate, format by format.

    python benches/gemm.py [FORMAT ...]

At few rows the product streams the matrix, so its read share counts; at many, its share of the rate of the
inner loop alone. The unpack share is against the same rows over a matrix in the second cache.
"""

from __future__ import annotations

import sys

from common import Product, beside, multiply_limit, packed, read_limit, report, rows_of, unpack_limit

FORMATS = ["q4_k", "q6_k", "q8_0", "bf16"]
ROWS_OF_X = [16, 32, 128, 512]
COLUMNS = 2048
MATRIX_BYTES = 64 << 20


def run(name: str, rows_of_x: int) -> None:
    weight = packed(name, rows_of(name, MATRIX_BYTES, COLUMNS), COLUMNS)
    product = Product([weight], rows_of_x)
    limits = [read_limit(), multiply_limit(name), unpack_limit(name, COLUMNS, rows_of_x)]
    figures = beside(limits, product, weight.nbytes, product.flop, slices=5)
    report(bench="gemm", format=name, rows=rows_of_x, **figures)


def main() -> None:
    for name in sys.argv[1:] or FORMATS:
        for rows_of_x in ROWS_OF_X:
            run(name, rows_of_x)


if __name__ == "__main__":
    main()
