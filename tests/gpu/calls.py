"""One call of every wrapper at the shapes of DeepSeek-V3 and Qwen3-30B-A3B: what a real step launches.

The tensors are meta ones, without memory: a wrapper that read device memory, or sized anything by what is
in it, would fail here as it would in a CUDA graph's capture. Run as a program, this compiles what the calls
launch, without a GPU and without the interpreter, for the compute capabilities in its argument.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing import get_context

import aot
import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS
from isthmus.formats.kv_cache import row_bytes
from isthmus.gpu import (
    activation,
    decode,
    dequantise,
    embedding,
    experts,
    fixed,
    linear,
    mla,
    prefill,
    rope,
    router,
    rows,
)
from isthmus.gpu.cache import read_rows
from isthmus.gpu.tiles import PackedMatrix


def f32(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32, device="meta")


def bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def i32(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32, device="meta")


def planes(width: int, *heads: int) -> Tensor:
    """A cache of q8_0."""
    nbytes = BLOCK_TOKENS * row_bytes("q8_0", width)
    return torch.empty(100, *heads, nbytes, dtype=torch.uint8, device="meta")


def packed(name: str, experts: int, rows: int, columns: int) -> PackedMatrix:
    return PackedMatrix.empty(name, experts, rows, columns, "meta")


def products(name: str, num_rows: int) -> Callable[[], object]:
    """q_a of DeepSeek-V3."""
    return lambda: linear.linear(
        bf16(num_rows, 7168), packed(name, 1, 1536, 7168), residual=bf16(num_rows, 1536)
    )


def routed(tokens: int, name: str = "q8_0", *, fixed: bool = False) -> Callable[[], object]:
    """A layer of Qwen3-30B-A3B."""
    gate, down = packed(name, 128, 768, 2048), packed(name, 128, 2048, 768)
    x, ids, weights = bf16(tokens, 2048), i32(tokens, 8), f32(tokens, 8)
    return lambda: experts.experts(x, ids, weights, i32(128), gate, gate, down, residual=x, fixed=fixed)


def biased(tokens: int) -> Callable[[], object]:
    """A layer of gpt-oss-20b."""
    gate = packed("mxfp4", 32, 2880, 2880)
    x, ids, weights, bias = bf16(tokens, 2880), i32(tokens, 4), f32(tokens, 4), f32(32, 2880)
    how = {"biases": (bias, bias, bias), "activation": "swiglu_oai", "limit": 7.0}
    return lambda: experts.experts(x, ids, weights, i32(32), gate, gate, gate, residual=x, **how)  # type: ignore[arg-type]


def sinks_and_window() -> object:
    cache, how = bf16(100, 8, 64, 64), {"window": 128, "sinks": f32(64)}
    decode.decode(bf16(4, 64, 64), cache, cache, i32(4), i32(4), i32(4, 512), 0.1, **how)  # type: ignore[arg-type]
    return prefill.prefill(bf16(512, 64, 64), cache, cache, i32(3), i32(512), i32(2, 512), 512, 0.1, **how)  # type: ignore[arg-type]


def gqa_decode(cache: Tensor) -> Callable[[], object]:
    return lambda: decode.decode(bf16(4, 32, 128), cache, cache, i32(4), i32(4), i32(4, 512), 0.1)


def gqa_prefill(cache: Tensor) -> Callable[[], object]:
    chunk = (i32(3), i32(512), i32(2, 512), 512, 0.1)
    return lambda: prefill.prefill(bf16(512, 32, 128), cache, cache, *chunk)


def mla_decode(cache: Tensor) -> Callable[[], object]:
    return lambda: decode.mla_decode(bf16(4, 128, 576), cache, 64, i32(4), i32(4), i32(4, 512), 0.1)


def mla_chunk() -> object:
    """A chunk at the end of 4096 keys: two segments."""
    q, cache, kv_b, out = bf16(512, 128, 192), bf16(100, 64, 576), bf16(128 * 256, 512), bf16(512, 128, 128)
    return mla.mla_prefill(q, cache, i32(64), i32(512), 4096, kv_b, 128, 0.1, out)


def expanded() -> object:
    made, latents, out = bf16(2048, 128, 256), bf16(2048, 576), bf16(512, 128, 128)
    carried = prefill.Carried(512, 128, 128, torch.device("meta"))
    prefill.segment_prefill(
        bf16(512, 128, 192), made[..., :128], latents[:, 512:], made[..., 128:], i32(512), 0.1, out, carried,
        first_key=2048, last=False,
    )  # fmt: skip
    return out


def ropes(keys: Tensor, latents: Tensor) -> Callable[[], object]:
    def calls() -> None:
        cos, norms = f32(4096, 64), {"q_norm": f32(128), "k_norm": f32(128), "eps": 1e-6}
        rope.rope_write(bf16(4, 40 * 128), 32, 4, cos, cos, "neox", i32(4), i32(4), keys, keys, **norms)
        q, cos = bf16(4, 128, 192)[..., 128:], f32(4096, 32)
        rope.latent_write(q, q, bf16(4, 576), cos, cos, "norm", i32(4), i32(4), latents, f32(512), 1e-6)

    return calls


def joint_norms() -> object:
    """q and k of MiniMax-M2: 48 and 8 heads normalised as one, then half of each turns."""
    qkv, cos, caches = bf16(4, 64 * 128), f32(4096, 32), bf16(2, 100, 8, 64, 128)
    for part in (qkv[:, : 48 * 128], qkv[:, 48 * 128 : 56 * 128]):
        rows.rms_norm(part, f32(part.shape[1]), 1e-6, part)
    return rope.rope_write(qkv, 48, 8, cos, cos, "neox", i32(4), i32(4), *caches)


def row_operators() -> object:
    x = bf16(4, 7168)
    rows.rms_norm(x, f32(7168), 1e-6, add=x, summed=x)
    return activation.act_mul(x, x)


def routers() -> object:
    how = {"scoring": "sigmoid", "groups": 8, "groups_kept": 4, "group_score": "top2_sum", "normalise": True}
    return router.route(f32(4, 256), 8, bias=f32(256), scale=2.5, **how)  # type: ignore[arg-type]


# On every card: every kernel once.
CALLS: dict[str, Callable[[], object]] = {
    "linear, 1 row": products("q8_0", 1),
    "linear, 64 rows": products("q8_0", 64),
    "dequantise": lambda: dequantise.dequantise(packed("q8_0", 1, 1536, 7168)),
    "embed": lambda: embedding.embed(i32(4), packed("q8_0", 1, 129280, 7168), bf16(4, 7168)),
    "experts, 512 tokens": routed(512),
    "MLA decode": mla_decode(bf16(100, 64, 576)),
    "MLA decode over q8_0": mla_decode(planes(576)),
    "MLA prefill": expanded,
    "latents of q8_0": lambda: read_rows(planes(576), i32(32), 2000, 576),
    "GQA decode over q8_0": gqa_decode(planes(128, 4)),
    "GQA prefill over q8_0": gqa_prefill(planes(128, 4)),
    "fixed product": lambda: fixed.product_f32(f32(4, 7168), f32(256, 7168)),
    "rope": ropes(bf16(100, 4, 64, 128), bf16(100, 64, 576)),
    "rows": row_operators,
    "router": routers,
}

# The same kernels otherwise: on the card with the least shared memory.
VARIANTS: dict[str, Callable[[], object]] = {
    "linear, q4_k, 1 row": products("q4_k", 1),
    "linear, q4_k, 8 rows": products("q4_k", 8),
    "linear, q6_k, 8 rows": products("q6_k", 8),
    "linear, q5_k, 9 rows": products("q5_k", 9),
    "linear, q6_k, 64 rows": products("q6_k", 64),
    "dequantise, q6_k": lambda: dequantise.dequantise(packed("q6_k", 1, 1536, 7168)),
    "embed, q6_k": lambda: embedding.embed(i32(4), packed("q6_k", 1, 129280, 7168), f32(4, 7168)),
    "experts, 1 token": routed(1),
    "experts, q4_k, 2048 tokens": routed(2048, "q4_k"),
    "experts with biases, 1 token": biased(1),
    "experts with biases, 512 tokens": biased(512),
    "GQA with sinks and a window": sinks_and_window,
    "fixed experts, 1 token": routed(1, fixed=True),
    "fixed, transposed": lambda: fixed.batched_f32(bf16(128, 4, 128), bf16(128, 128, 512).transpose(1, 2)),
    "GQA decode": gqa_decode(bf16(100, 4, 64, 128)),
    "GQA prefill": gqa_prefill(bf16(100, 4, 64, 128)),
    "rope into q8_0": ropes(planes(128, 4), planes(576)),
    "joint norms, partial rope": joint_norms,
    "MLA prefill, all of it": mla_chunk,
}


# What is to be compiled: call, launch, compute capability. Launches cannot be sent to another process, so
# workers are forked with the list.
_WORK: list[tuple[str, aot.Launch, int]] = []


def main(capabilities: list[int]) -> None:
    """Prints [call, what it is compiled to] of everything, a line each; a compiler to a CPU."""
    for calls, where in ((CALLS, capabilities), (VARIANTS, capabilities[:1])):
        for name, call in calls.items():
            _WORK.extend((name, launch, c) for launch in aot.launches_of(call) for c in where)
    with get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for line in pool.imap_unordered(_compile, range(len(_WORK))):
            print(json.dumps(line), flush=True)


def _compile(index: int) -> tuple[str, dict[str, object]]:
    name, launch, capability = _WORK[index]
    return name, asdict(aot.compile_for(launch, capability))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
