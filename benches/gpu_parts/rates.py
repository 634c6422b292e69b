"""Products by format and MLA decodes against the card's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from gpu_parts.kernels import KV_DTYPES, Maker, fp8_matrix
from gpu_parts.lines import Line, Setting, against, apart, microseconds
from isthmus.formats.kv_cache import KvDtype, row_bytes
from isthmus.formats.spec import by_name
from isthmus.gpu import decode, fp8, linear, plain, reference_attention
from isthmus.gpu.tiles import GPU_FORMATS

# name: (outputs, columns) of DeepSeek-V3's dense products
SHAPES = {"q_a": (1536, 7168), "q_b": (24576, 1536), "o": (7168, 16384), "shared gate": (2048, 7168)}
MEASURED_BYTES = 1 << 30  # of weights that a graph walks over
CONTEXTS = (4096, 32768, 131072)


def copies_of(nbytes: int) -> int:
    """How many of them a graph walks over, so that none is still in the cache when its turn comes again."""
    return max(2, min(128, MEASURED_BYTES // nbytes))


def copy_microseconds(device: torch.device) -> float:
    source = torch.empty(MEASURED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return microseconds([lambda: target.copy_(source)])


def rates(setting: Setting) -> Iterator[Line]:
    """Products and MLA decodes against the card's memory: of replayed graphs that walk over more weights than
    its cache holds; the share is of a copy's rate, read and write counted."""
    if setting.quick:
        return
    make = Maker(setting.device)
    copy = copy_microseconds(make.device)
    limit = 2 * MEASURED_BYTES / copy / 1e3
    yield Line("copy, the limit", None, None, copy, limit, 1.0)

    def line(what: str, nbytes: int, calls: list[Callable[[], object]]) -> Line:
        taken = microseconds(calls)
        return Line(what, None, None, taken, nbytes / taken / 1e3, nbytes / taken / 1e3 / limit)

    for name in GPU_FORMATS:
        yield from apart(name, _packed(make, line, name))
    yield from apart("bf16", _plain(make, line))
    yield from apart("fp8", _fp8(make, line))
    for context, kv_dtype in product(CONTEXTS, KV_DTYPES):
        yield from apart(f"MLA decode, {kv_dtype}", _mla(make, line, context, kv_dtype))
        yield from apart(f"GQA decode, {kv_dtype}", _gqa(make, line, context, kv_dtype))


Measure = Callable[[str, int, list[Callable[[], object]]], Line]


def _packed(make: Maker, line: Measure, name: str) -> Iterator[Line]:
    for shape, (n, k) in SHAPES.items():
        nbytes = n * by_name(name).row_bytes(k)
        weights = [make.weight(name, n, k) for _ in range(copies_of(nbytes))]
        for count in (1, 8) if shape == "q_a" else (1,):
            x, out = make.bf16(count, k), torch.empty(count, n, dtype=torch.bfloat16, device=make.device)
            calls: list[Callable[[], object]] = [partial(linear.linear, x, w, out) for w in weights]
            yield line(f"{name} {shape} {n} x {k}, {count} rows", nbytes, calls)


def _plain(make: Maker, line: Measure) -> Iterator[Line]:
    """What a file's bf16 weights take, and what the formats are beside."""
    for shape, (n, k) in SHAPES.items():
        dense = [make.bf16(n, k) for _ in range(copies_of(2 * n * k))]
        x = make.bf16(1, k)
        calls: list[Callable[[], object]] = [partial(plain.product_f32, x, w) for w in dense]
        yield line(f"bf16 by torch {shape} {n} x {k}, 1 rows", 2 * n * k, calls)
        del dense, calls


def _fp8(make: Maker, line: Measure) -> Iterator[Line]:
    for (shape, (n, k)), blocks in product(SHAPES.items(), (True, False)):
        quarter = [fp8_matrix(make, n, k, blocks=blocks) for _ in range(copies_of(n * k))]
        x = make.bf16(1, k)
        way = "scaled" if fp8.can_scale(quarter[0]) else "dequantised"
        calls: list[Callable[[], object]] = [partial(fp8.product_fp8, x, w) for w in quarter]
        yield line(f"fp8 by {'block' if blocks else 'row'}, {way}, {shape} {n} x {k}, 1 rows", n * k, calls)
        del quarter, calls


def _mla(make: Maker, line: Measure, context: int, kv_dtype: KvDtype) -> Iterator[Line]:
    blocks, what = context // 64, f"MLA decode, {kv_dtype}, {context} keys"
    where = (make.i32([0]), make.i32([context - 1]), make.tables(1, blocks), 0.07)
    q, out, nbytes = make.bf16(1, 128, 576), make.bf16(1, 128, 512), context * row_bytes(kv_dtype, 576)
    caches = [make.cache(kv_dtype, blocks, width=576) for _ in range(copies_of(nbytes))]
    found = decode.mla_decode(q, caches[0], 64, *where)
    yield against(what, 8e-3, found, reference_attention.mla_decode(q, caches[0], 64, *where))
    yield line(what, nbytes, [partial(decode.mla_decode, q, cache, 64, *where, out) for cache in caches])


def _gqa(make: Maker, line: Measure, context: int, kv_dtype: KvDtype) -> Iterator[Line]:
    """qwen3-30b-a3b's heads."""
    blocks = context // 64
    where = (make.i32([0]), make.i32([context - 1]), make.tables(1, blocks), 0.07)
    q, nbytes = make.bf16(1, 32, 128), 2 * context * 4 * row_bytes(kv_dtype, 128)
    pairs = [[make.cache(kv_dtype, blocks, 4, width=128) for _ in "kv"] for _ in range(copies_of(nbytes))]
    calls = [partial(decode.decode, q, *pair, *where, torch.empty_like(q)) for pair in pairs]
    yield line(f"GQA decode, {kv_dtype}, {context} keys", nbytes, calls)
