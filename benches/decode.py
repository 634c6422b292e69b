"""Decoding one sequence with a whole model: tokens per second, and the share of what the memory gives.

python benches/decode.py [MODEL] [--isa amx avx512 avx2]
"""

from __future__ import annotations

from common import report, setting
from isthmus import native
from isthmus.cli.measure import measure_decode
from model import arguments, loaded

NEW_TOKENS = 32


def main() -> None:
    args = arguments(__doc__)
    with loaded(args.model) as (engine, path):
        for isa in args.isa:
            native.use_isa(isa)
            figures = measure_decode(engine, args.prompt_tokens, NEW_TOKENS)
            line = {
                "tok_s": round(figures["decode_tok_s"], 2),
                "gb_s": round(figures["read_gb_s"], 2),
                "read_limit_gb_s": round(figures["read_limit_gb_s"], 2),
                "read_share": round(figures["decode_share"], 3),
                "memory_states": figures["memory_states"],
                "outside_products_share": round(figures["outside_products_share"], 3),
            }
            report(bench="decode", model=path.stem, prompt_tokens=args.prompt_tokens, **line, **setting())


if __name__ == "__main__":
    main()
