"""Decoding over a long context with a cache of bf16 and one of q8_0, in turns, beside the read limit.

python benches/kv_cache.py [MODEL] [--contexts 8192 32768] [--rounds 7] [--only decode] [--isa avx512 avx2]

`attention` lines: one row over the caches of as many layers as leave the CPU's own caches; bytes are the
cache's. `decode` lines: a step through all layers of a model (by default 4 of qwen3-30b-a3b, random weights)
whose sequence is so long, without the head, which few layers would not outweigh; bytes are the cache's and
the weights'. `faster` is the median over rounds of bf16's time over q8_0's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import torch

from common import LIMIT_SLICE_S, SLICE_S, read_limit, report, setting, timed
from isthmus import native
from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine.batch import Batch
from isthmus.engine.state import PagedKeyValue, PagedLatent, State, StateKind
from isthmus.formats.kv_cache import KvDtype
from isthmus.models.base import load_model
from isthmus.native.rows import Attention, MlaAttention
from isthmus.placement.sizes import decode_weight_bytes, kv_token_bytes
from isthmus.resolve import resolve_model
from isthmus.weights.source import open_weights

Work = tuple[Callable[[], object], float]  # and the bytes it reads
TYPES: tuple[KvDtype, ...] = ("bf16", "q8_0")
LEAST_CACHE_BYTES = 256 << 20
MODEL = "dummy:qwen3-30b-a3b?layers=4&quant=q4_k_m"


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int  # 0: latent attention
    dims: int
    latent: int = 0

    @property
    def kind(self) -> StateKind:
        return PagedKeyValue(self.kv_heads, self.dims) if self.kv_heads else PagedLatent(self.dims)


SHAPES = (
    Shape("qwen3-30b-a3b", 32, 4, 128),
    Shape("mixtral-8x7b", 32, 8, 128),
    Shape("deepseek-v2-lite", 16, 0, 576, 512),
)


def one_row(context: int) -> Batch:
    """The last token of one sequence, whose blocks stand in a random order."""
    position, blocks = context - 1, context // BLOCK_TOKENS
    tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).int()[None]
    slot = int(tables[0, -1]) * BLOCK_TOKENS + position % BLOCK_TOKENS
    one = {name: torch.tensor([value]).int() for name, value in (("positions", position), ("slots", slot))}
    zero = torch.zeros(1, dtype=torch.int32)
    return Batch(tokens=zero, sequences=zero, block_tables=tables, logit_rows=zero, **one)


def touched(state: State) -> State:
    """Any values: zeros would not be in memory before they are written."""
    for layer in state.layers:
        for tensor in vars(layer).values():
            tensor.view(torch.uint8).fill_(0x11)  # finite in every type
    return state


def attention(shape: Shape, kv_dtype: KvDtype, context: int) -> Work:
    """(one row over the caches of some layers, the bytes it reads)."""
    layer_bytes = context * shape.kind.token_bytes(kv_dtype)
    layers = 1 + LEAST_CACHE_BYTES // (context * shape.kind.token_bytes("q8_0"))
    blocks = context // BLOCK_TOKENS
    state = touched(State([shape.kind] * layers, blocks, kv_dtype))
    rows = one_row(context).prepare(vocab_size=1, num_blocks=blocks).rows
    q = torch.randn(shape.heads * shape.dims)
    out = torch.empty_like(q)
    caches = [[tensor.data_ptr() for tensor in vars(layer).values()] for layer in state.layers]

    def over_all() -> State:
        for addresses in caches:
            if shape.kv_heads:
                gqa(q.data_ptr(), len(q), rows, *addresses, out.data_ptr(), len(q))
            else:
                mla(q.data_ptr(), rows, *addresses, out.data_ptr())
        return state

    if shape.kv_heads:
        gqa = Attention(shape.heads, shape.kv_heads, shape.dims, 0.1, kv_dtype=kv_dtype, exact=False)
    else:
        rope = shape.dims - shape.latent
        mla = MlaAttention(shape.heads, shape.latent, rope, 0.1, kv_dtype=kv_dtype, exact=False)
    return over_all, layers * layer_bytes


def decode(name: str, kv_dtype: KvDtype, context: int) -> Work:
    """(a step through a model's layers, the bytes it reads)."""
    options = RunOptions(context_tokens=context, kv_dtype=kv_dtype).with_environment()
    source = open_weights(resolve_model(name))
    model = load_model(source, options)
    state = touched(State(model.state_spec(), context // BLOCK_TOKENS, kv_dtype))
    batch = replace(one_row(context), logit_rows=torch.empty(0, dtype=torch.int32))
    head = source.tensors.get("output.weight") or source.tensors["token_embd.weight"]

    def step() -> None:
        with torch.inference_mode():
            model.forward(batch, state)

    cached = context * kv_token_bytes(source.metadata, kv_dtype)
    return step, decode_weight_bytes(source) - head.nbytes + cached


def compare(
    what: dict[str, Any], works: dict[KvDtype, tuple[Callable[[], object], float]], rounds: int
) -> None:
    limit = read_limit()
    seconds: dict[KvDtype, list[float]] = {dtype: [] for dtype in works}
    limits: list[float] = []
    for work, _ in works.values():
        work()
    for _ in range(rounds):
        for dtype, (work, _) in works.items():
            limits.append(limit.rate(LIMIT_SLICE_S))
            seconds[dtype].append(timed(work, SLICE_S))
    for dtype, (_, nbytes) in works.items():
        rate = nbytes / median(seconds[dtype]) / 1e9
        faster = median(a / b for a, b in zip(seconds["bf16"], seconds[dtype], strict=True))
        figures = {"ms": round(1e3 * median(seconds[dtype]), 2), "gb_s": round(rate, 2)}
        figures |= {"read_limit_gb_s": round(median(limits), 2), "faster": round(faster, 2)}
        report(**what, kv_dtype=dtype, **figures, **setting())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("attention", "decode"))
    parser.add_argument("--isa", nargs="+", default=[native.current_isa()], choices=native.isa_names())
    args = parser.parse_args()
    for isa in args.isa:
        native.use_isa(isa)
        for context, shape in product(args.contexts, SHAPES if args.only != "decode" else ()):
            works = {dtype: attention(shape, dtype, context) for dtype in TYPES}
            compare({"bench": "attention", "shape": shape.name, "context": context}, works, args.rounds)
        for context in args.contexts if args.only != "attention" else ():
            steps = {dtype: decode(args.model, dtype, context) for dtype in TYPES}
            compare({"bench": "decode", "model": args.model, "context": context}, steps, args.rounds)


if __name__ == "__main__":
    main()
