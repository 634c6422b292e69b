"""What fast products cost the demo model, over as much text as wanted: excess of perplexity, and KL.

    python benches/perplexity.py [FORMAT ...] [--tokens 4096] [--kv-dtype f32 bf16 q8_0]

The text is CPython's own documentation (pydoc), in pieces of 512 tokens; the model is the dense one, rounded
to each format; the float products are those of transformers in fp32. One JSON line for each format, driver
and instruction set whose bits differ, and type of the cache. Without formats: all of 32 columns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

from common import report
from isthmus import native
from isthmus.cli.measure import commit
from isthmus.formats.kv_cache import KV_DTYPES, KvDtype
from isthmus.formats.spec import FORMATS

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from demo import dense
from demo.dense import CHUNK, Distance, Products, standard_error


def run(name: str, pieces: list[list[int]], folder: Path, kv_dtypes: list[KvDtype]) -> None:
    weights = dense.rounded(name)
    path = dense.write_dense(folder / "dense.gguf", weights)
    float_model = dense.float_model(weights)
    wanted_products = [replace(p, kv_dtype=dtype) for p in dense.all_products() for dtype in kv_dtypes]
    models = {products: products.load(path) for products in wanted_products}
    distances: dict[Products, list[Distance]] = {products: [] for products in models}
    # What the cache alone costs, without the products' own noise.
    rounded = {Products("transformers", "fp32", dtype): [] for dtype in kv_dtypes if dtype != "f32"}
    for piece in pieces:
        wanted = dense.float_log_probs(float_model, piece)
        for products, found in distances.items():
            found.append(Distance.between(wanted, products.log_probs(models[products], piece), piece))
        for products, found in rounded.items():
            got = dense.float_log_probs(float_model, piece, products.kv_dtype)
            found.append(Distance.between(wanted, got, piece))
    for products, found in (*distances.items(), *rounded.items()):
        all_of_them = Distance.joined(found)
        report(
            bench="perplexity",
            format=name,
            driver=products.driver,
            isa=products.isa,
            kv_dtype=products.kv_dtype,
            tokens=len(all_of_them.kl),
            perplexity=round(all_of_them.perplexity, 3),
            excess_percent=round(100 * float(all_of_them.excess.mean()), 3),
            excess_error=round(100 * standard_error(all_of_them.excess), 3),
            kl_percent=round(100 * float(all_of_them.kl.mean()), 3),
            kl_error=round(100 * standard_error(all_of_them.kl), 3),
            threads=native.num_threads(),
            commit=commit(),
        )


def main() -> None:
    formats = [spec.name for spec in FORMATS.values() if spec.block_columns == 32 and spec.runnable]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", nargs="*", default=formats, metavar="FORMAT")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kv-dtype", nargs="+", default=["f32"], choices=KV_DTYPES)
    args = parser.parse_args()
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = dense.tokens_of(text, args.tokens)
    pieces = [tokens[i : i + CHUNK] for i in range(0, len(tokens) - CHUNK + 1, CHUNK)]
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        for name in args.formats:
            run(name, pieces, Path(folder), args.kv_dtype)


if __name__ == "__main__":
    main()
