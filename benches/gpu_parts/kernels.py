"""Each Triton kernel against its reference; and under exact_batching a row alone against the same one among
others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_parts.lines import Line, Setting, against, apart
from isthmus.config import BLOCK_TOKENS
from isthmus.formats.kv_cache import KvDtype, row_bytes
from isthmus.formats.spec import by_name
from isthmus.gpu import (
    activation,
    decode,
    dequantise,
    embedding,
    experts,
    fixed_kernels,
    fp8,
    linear,
    mla,
    prefill,
    reference,
    reference_attention,
    reference_rows,
    rope,
    router,
    rows,
)
from isthmus.gpu.fp8 import Fp8Matrix
from isthmus.gpu.reference_cache import put
from isthmus.gpu.tiles import GPU_FORMATS, PackedMatrix

# Give weights of about 0.1.
SCALES = {"q8_0": 2**-8, "q4_k": 2**-9, "q5_k": 2**-10, "q6_k": 2**-12}
MXFP4_EXPONENT = 128 - 5

KV_DTYPES: tuple[KvDtype, ...] = ("bf16", "q8_0")  # that a device reads


class Maker:
    """Random tensors on the device, the same every time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def f32(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def bf16(self, *shape: int) -> Tensor:
        return self.f32(*shape).bfloat16()

    def i32(self, values: list[int] | range) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def cache(self, kv_dtype: KvDtype, num_blocks: int, *heads: int, width: int) -> Tensor:
        """Normal values in bf16 or q8_0."""
        if kv_dtype == "bf16":
            return self.bf16(num_blocks, *heads, BLOCK_TOKENS, width)
        out = planes(num_blocks, *heads, width=width, device=self.device)
        for some in out.split(64):  # fp32 of all would be four times as much, several times
            slots = torch.arange(len(some) * BLOCK_TOKENS, device=self.device)
            put(some, slots, self.f32(len(slots), *heads, width))
        return out

    def tables(self, sequences: int, blocks: int) -> Tensor:
        """Block tables of sequences whose blocks lie scattered."""
        order = torch.randperm(sequences * blocks, generator=self.generator, device=self.device)
        return order.int().view(sequences, blocks)

    def weight(self, name: str, outputs: int, columns: int, slots: int = 1) -> PackedMatrix:
        """Random tiles: fp16 scales stand first in each, 16 of them, and the minima's after them; in those of
        MXFP4 exponents."""
        out = PackedMatrix.empty(name, slots, outputs, columns, self.device)
        out.data.random_(0, 256, generator=self.generator)
        tiles = out.data.view(-1, 16 * by_name(name).block_bytes)
        if name == "mxfp4":
            tiles[:, :16] = MXFP4_EXPONENT
            return out
        halves = 2 if name in ("q4_k", "q5_k") else 1
        scale = torch.full((16 * halves,), SCALES[name], dtype=torch.float16, device=self.device)
        tiles[:, : 32 * halves] = scale.view(torch.uint8)
        return out


def planes(num_blocks: int, *heads: int, width: int, device: torch.device) -> Tensor:
    """Zeroed memory of a cache of q8_0."""
    nbytes = BLOCK_TOKENS * row_bytes("q8_0", width)
    return torch.zeros(num_blocks, *heads, nbytes, dtype=torch.uint8, device=device)


def kernels(setting: Setting) -> Iterator[Line]:
    """Every kernel's result; compilation takes most of the time. One that does not compile is said, and the
    others are checked."""
    make, quick = Maker(setting.device), setting.quick
    for name in GPU_FORMATS[:2] if quick else GPU_FORMATS:
        yield from apart(name, check_weights(make, quick, name))
    yield from apart("experts", check_experts(make, quick))
    yield from apart("fp8", check_fp8(make, quick))
    yield from apart("rows", check_rows(make, quick))
    yield from apart("router", check_router(make, quick))
    yield from apart("rope", check_rope(make, quick))
    yield from apart("q8_0 cache", check_q8_0_cache(make, quick))
    for kv_dtype in KV_DTYPES:
        yield from apart(f"GQA over {kv_dtype}", check_gqa(make, quick, kv_dtype))
        yield from apart(f"MLA over {kv_dtype}", check_mla(make, quick, kv_dtype))
    yield from apart("exact batching", check_fixed(make, quick))


def check_weights(make: Maker, quick: bool, name: str) -> Iterator[Line]:
    n, k = (40, 256) if quick else (2048 + 8, 7168)
    weight = make.weight(name, n, k)
    dense = reference.dequantise(weight)[0]
    yield against(f"{name} to bf16", 0, dequantise.dequantise(weight), dense.bfloat16())
    tokens = make.i32([n - 1, 0, 17])
    found = embedding.embed(tokens, weight, torch.empty(3, k, device=make.device))
    yield against(f"{name}, rows", 0, found, dense[tokens.long()])
    for count, tolerance in (
        ((3, 1e-5), (9, 3e-3)) if quick else ((1, 1e-5), (8, 1e-5), (16, 3e-3), (300, 3e-3), (600, 3e-3))
    ):
        x = make.bf16(count, k)
        got = linear.linear(x, weight, torch.empty(count, n, device=make.device))
        yield against(f"{name}, {count} rows", tolerance, got, x.float() @ dense.T)


def check_experts(make: Maker, quick: bool) -> Iterator[Line]:
    hidden, inner = (32, 32) if quick else (2048, 768)
    gate, up, down = (make.weight("q8_0", *shape, 3) for shape in ((inner, hidden),) * 2 + ((hidden, inner),))
    slot_of = make.i32([-1, 2, 0, 1])
    for tokens in (1, 12) if quick else (1, 8, 300):
        x, ids = make.bf16(tokens, hidden), make.f32(tokens, 4).argsort(1)[:, :2].int()
        how = (x, ids, make.f32(tokens, 2).abs(), slot_of, gate, up, down)
        outs = (torch.empty(tokens, hidden, device=make.device) for _ in range(2))
        yield against(
            f"experts, {tokens} tokens",
            8e-3,
            experts.experts(*how, next(outs)),
            reference.experts(*how, next(outs)),
        )


def fp8_matrix(make: Maker, n: int, k: int, *, blocks: bool) -> Fp8Matrix:
    """Values of about 0.1, scales that differ by a half."""
    of = (-(-n // 128), -(-k // 128)) if blocks else (n, 1)
    scales = 2**-9 * (1 + torch.rand(*of, generator=make.generator, device=make.device) / 2)
    return Fp8Matrix((make.f32(n, k) * 40).to(fp8.FP8), scales)


def check_fp8(make: Maker, quick: bool) -> Iterator[Line]:
    """x in FP8 has 4 significant bits: 2.6 % of a product's norm."""
    n, k = (48, 272) if quick else (2048, 7168)
    for blocks in (True, False):
        weight, what = fp8_matrix(make, n, k, blocks=blocks), f"fp8, a scale a {'block' if blocks else 'row'}"
        for count in (3,) if quick else (1, 64, 600):
            x = make.bf16(count, k)
            expected = x.float() @ weight.values(torch.float32).T
            yield against(f"{what}, {count} rows, dequantised", 3e-3, fp8.dequantised(x, weight), expected)
            if fp8.can_scale(weight):
                yield against(f"{what}, {count} rows, scaled", 4e-2, fp8.scaled(x, weight), expected)


def check_rows(make: Maker, quick: bool) -> Iterator[Line]:
    x, weight = make.bf16(3, 100 if quick else 7168), make.f32(100 if quick else 7168)
    norms = (
        f(x, weight, 1e-6, torch.empty_like(x.float())) for f in (rows.rms_norm, reference_rows.rms_norm)
    )
    yield against("rms norm", 1e-5, *norms)
    yield against("silu * up", 5e-3, activation.act_mul(x, x), reference_rows.act_mul(x, x))


def check_router(make: Maker, quick: bool) -> Iterator[Line]:
    logits, bias = make.f32(4 if quick else 64, 256), make.f32(256) / 4
    how = {"scoring": "sigmoid", "bias": bias, "groups": 8, "groups_kept": 4, "group_score": "top2_sum"}
    got, expected = (f(logits, 8, **how) for f in (router.route, reference_rows.route))
    yield against("router's ids", 0, got[0], expected[0])
    yield against("router's weights", 1e-5, got[1], expected[1])


def check_rope(make: Maker, quick: bool) -> Iterator[Line]:
    heads, dim = (2, 16) if quick else (32, 128)
    angles = torch.arange(300, device=make.device)[:, None] * 0.9 ** torch.arange(
        dim // 2, device=make.device
    )
    turned = []
    qkv = make.bf16(3, (heads + 4) * dim)
    for write in (rope.rope_write, reference_attention.rope_write):
        q, caches = qkv.clone(), torch.zeros(2, 3, 2, 64, dim, dtype=torch.bfloat16, device=make.device)
        place = (make.i32([0, 65, 299]), make.i32([130, 0, 70]))
        write(q, heads, 2, angles.cos(), angles.sin(), "neox", *place, *caches)
        turned.append(torch.cat([q[:, : heads * dim].flatten(), caches.flatten()]))
    yield against("rope and cache", 5e-3, *turned)


def check_gqa(make: Maker, quick: bool, kv_dtype: KvDtype) -> Iterator[Line]:
    over = "" if kv_dtype == "bf16" else f" over {kv_dtype}"
    heads, kv_heads, dim, blocks = (2, 1, 40, 2) if quick else (32, 4, 128, 40)
    length = blocks * 64 - 3
    keys, values = (make.cache(kv_dtype, 2 * blocks, kv_heads, width=dim) for _ in "kv")
    tables, q = make.tables(2, blocks), make.bf16(2, heads, dim)
    where = (make.i32([0, 1]), make.i32([length - 1, 70]), tables)
    how = (q, keys, values, *where, dim**-0.5)
    yield against(f"GQA decode{over}", 8e-3, decode.decode(*how), reference_attention.decode(*how))
    count = 5 if quick else 200
    q, positions = make.bf16(count, heads, dim), make.i32(range(length - count, length))
    chunk = (q, keys, values, make.i32([0, count, count]), positions, tables, count, dim**-0.5)
    got = prefill.prefill(*chunk)
    yield against(f"GQA prefill{over}", 8e-3, got, reference_attention.prefill(*chunk))


def check_mla(make: Maker, quick: bool, kv_dtype: KvDtype) -> Iterator[Line]:
    over = "" if kv_dtype == "bf16" else f" over {kv_dtype}"
    blocks, count = (2, 5) if quick else (40, 200)
    length = blocks * 64 - 3
    tables = make.tables(2, blocks)
    where, positions = (
        (make.i32([0, 1]), make.i32([length - 1, 70]), tables),
        make.i32(range(length - count, length)),
    )
    heads, latent, rope_dims, nope, value = (2, 32, 8, 12, 10) if quick else (128, 512, 64, 128, 128)
    width, scale = latent + rope_dims, (nope + rope_dims) ** -0.5
    cache = make.cache(kv_dtype, 2 * blocks, width=width)
    absorbed = (make.bf16(2, heads, width), cache, rope_dims, *where, scale)
    got = decode.mla_decode(*absorbed)
    yield against(f"MLA decode{over}", 8e-3, got, reference_attention.mla_decode(*absorbed))
    kv_b = (make.f32(heads * (nope + value), latent) * latent**-0.5).bfloat16()
    far = (make.bf16(count, heads, nope + rope_dims), cache, tables[0], positions, length, kv_b, nope, scale)
    outs = [torch.empty(count, heads, value, device=make.device) for _ in range(2)]
    got = mla.mla_prefill(*far, outs[0], segment_tokens=64 if quick else 1024)
    yield against(f"MLA prefill{over}", 1.2e-2, got, reference_attention.mla_prefill(*far, outs[1]))


def check_q8_0_cache(make: Maker, quick: bool) -> Iterator[Line]:
    """Bytes as the reference writes them, of rows that are not turned: what turns is rounded in two ways."""
    heads, kv_heads, dim = (2, 1, 40) if quick else (32, 4, 128)
    rows = 40
    one, zero = torch.ones(1, dim // 2, device=make.device), torch.zeros(1, dim // 2, device=make.device)
    qkv, where = make.bf16(rows, (heads + 2 * kv_heads) * dim), (make.i32([0] * rows), make.i32(range(rows)))
    qkv[7, (heads + kv_heads) * dim] = float("nan")
    written = []
    for write in (rope.rope_write, reference_attention.rope_write):
        caches = [planes(1, kv_heads, width=dim, device=make.device) for _ in "kv"]
        write(qkv.clone(), heads, kv_heads, one, zero, "neox", *where, *caches)
        written.append(torch.cat(caches))
    yield against("q8_0 cache, bytes", 0, *written)


def check_fixed(make: Maker, quick: bool) -> Iterator[Line]:
    """Under exact_batching, bit for bit: a row alone, and at another place among others."""
    n, k, rows = (40, 64, 18) if quick else (2048, 7168, 40)
    x, at = make.bf16(rows, k), rows - 2

    def alike(what: str, together: Tensor, alone: Tensor) -> Line:
        return Line(f"{what}: a row alone = among {rows}", float((together[at] - alone[0]).abs().amax()), 0.0)

    for name in ("q8_0",) if quick else GPU_FORMATS:
        weight = make.weight(name, n, k)
        whole = fixed_kernels.linear(x, weight)
        yield alike(f"{name}, fixed", whole, fixed_kernels.linear(x[at : at + 1].clone(), weight))
    # Tensor cores cut off what leaves a sum's 24 bits, always towards 0: up to 2^-23 of it every 8 columns.
    # Over 7168 of them, of sums that grow as their root: 896 * 2^-23 * 2 / 3 = 7e-5. A column left out: 1e-2.
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-4)):
        plain = make.f32(n, k).to(dtype)
        whole = fixed_kernels.product_f32(x, plain)
        yield alike(f"{dtype}, fixed", whole, fixed_kernels.product_f32(x[at : at + 1], plain))
        yield against(f"{dtype}, fixed", tolerance, whole, x.to(dtype).double() @ plain.double().T)
    hidden, inner = (32, 32) if quick else (2048, 768)
    gate, up, down = (make.weight("q8_0", *shape, 3) for shape in ((inner, hidden),) * 2 + ((hidden, inner),))
    x, ids = make.bf16(rows, hidden), make.f32(rows, 4).argsort(1)[:, :2].int()
    weights, slot_of = make.f32(rows, 2).abs(), make.i32([-1, 2, 0, 1])
    whole = fixed_kernels.experts(x, ids, weights, slot_of, gate, up, down)
    one = (x[at : at + 1].clone(), ids[at : at + 1].clone(), weights[at : at + 1].clone())
    yield alike("experts, fixed", whole, fixed_kernels.experts(*one, slot_of, gate, up, down))
