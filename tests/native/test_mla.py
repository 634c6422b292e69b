"""Multi-head latent attention: the rows that are cached, the absorbed form, and the expanded form beside it.

Both forms are one formula (mla_kit.py).
"""

from __future__ import annotations

import pytest
import torch
from mla_kit import Latents
from rows_kit import (
    assert_close,
    assert_same_bits,
    make_step,
    on_every_isa,
    randn,
    scattered_tables,
    with_threads,
)
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RMSNorm,
    apply_rotary_pos_emb_interleave,
)

from cache_kit import DTYPES
from isthmus.formats.kv_cache import KV_DTYPES
from isthmus.native.rows import BLOCK_TOKENS, LatentWrite, RopeTable, SegmentAttention

# Scores are chains of up to 576 fma; their errors, a few 1e-6 of scores of order 1, are the weights' errors.
TOLERANCE = 8e-6


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "latent", "rope"), [(16, 512, 64), (5, 40, 8), (40, 96, 32)])
def test_absorbed_is_the_formula_written_out(heads: int, latent: int, rope: int, kv_dtype: str) -> None:
    problem = Latents([100, 1, 577], heads, latent, rope, kv_dtype=kv_dtype)
    rows = [(0, position) for position in range(60, 70)] + [(1, 0), (2, 576)]
    got = on_every_isa(lambda: problem.absorbed(rows))
    assert_close(problem.values_of(got), problem.expected(rows), TOLERANCE)


def test_absorbed_rows_do_not_depend_on_batch_chunk_or_threads() -> None:
    problem = Latents([1100, 70], 48, 64, 16)
    rows = [(0, position) for position in range(1060, 1100)] + [(1, 69)]
    whole = with_threads(1, lambda: problem.absorbed(rows))
    assert_same_bits(torch.cat([problem.absorbed([row]) for row in rows]), whole, "row by row")
    assert_same_bits(torch.cat([problem.absorbed(rows[:9]), problem.absorbed(rows[9:])]), whole, "two chunks")
    for threads in range(2, 8):
        assert_same_bits(with_threads(threads, lambda: problem.absorbed(rows)), whole, f"{threads} threads")
        alone = with_threads(threads, lambda: problem.absorbed(rows[39:40]))
        assert_same_bits(alone, whole[39:40], f"decode alone on {threads} threads")


def test_expanded_is_the_formula_too() -> None:
    problem = Latents([150], 6, 64, 16, kv_dtype="f32")
    rows = [(0, position) for position in range(100, 150)]
    keys, values = (x.float().contiguous() for x in problem.keys_and_values(0, 150))
    q, positions = problem.queries(rows), torch.arange(100, 150, dtype=torch.int32)
    op = SegmentAttention(6, 6, problem.nope + problem.rope, problem.value, problem.scale)
    out = torch.empty(50, 6, problem.value)
    addresses = (keys.data_ptr(), values.data_ptr())
    op(q.data_ptr(), positions.data_ptr(), 50, *addresses, 150, out.data_ptr())
    assert_close(out, problem.expected(rows), TOLERANCE)


@pytest.mark.parametrize("kv_dtype", ["bf16", "f32"])
def test_latent_write_is_transformers(kv_dtype: str) -> None:
    """Turned pairs in q and in the one rope part of k, the latent part normalised, one cached row a token."""
    heads, nope, latent, rope, eps = 3, 24, 48, 16, 1e-6
    tables, num_blocks = scattered_tables([130, 70], torch.Generator().manual_seed(1))
    step = make_step(tables, num_blocks, [(0, p) for p in range(60, 130)] + [(1, 69)])
    num_rows = len(step.positions)
    q, kv = randn(num_rows, heads, nope + rope, seed=2), randn(num_rows, latent + rope + 5, seed=3)
    norm = DeepseekV3RMSNorm(latent, eps)
    norm.weight.data = randn(latent, seed=4)
    angles = torch.arange(200)[:, None] * 10000.0 ** (-torch.arange(0, rope, 2) / rope)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    table = RopeTable(cos.data_ptr(), sin.data_ptr(), 200, rope, "norm")
    options = {"kv_norm": norm.weight.data_ptr(), "eps": eps, "kv_dtype": kv_dtype}
    write = LatentWrite(heads, latent, table, **options)  # type: ignore[arg-type]
    cache = torch.empty(num_blocks, BLOCK_TOKENS, latent + rope, dtype=DTYPES[kv_dtype])

    def run() -> Tensor:
        cache.fill_(7.0)
        carried = torch.zeros(num_rows, heads, latent + rope)
        source = (q[0, 0, nope:].data_ptr(), q.stride(0), q.stride(1))
        to = (carried[0, 0, latent:].data_ptr(), carried.stride(0), carried.stride(1))
        write(*source, *to, kv.data_ptr(), kv.shape[1], step.rows(), cache.data_ptr())
        assert not carried[..., :latent].any()  # only the rope part is written
        return torch.cat([carried[..., latent:].flatten(), cache.float().flatten()])

    got = on_every_isa(run)
    at = step.positions.long()
    q_part = q[..., nope:].transpose(0, 1)[None]  # [1, heads, rows, rope]
    k_part = kv[:, latent : latent + rope][None, None]
    full_cos, full_sin = (torch.cat([x[at], x[at]], -1)[None] for x in (cos, sin))
    # transformers leaves the turned pairs as halves, here they stay pairs: the same permutation of q and k
    pairs = torch.arange(rope).view(2, -1).T.flatten()
    turned = apply_rotary_pos_emb_interleave(q_part, k_part, full_cos, full_sin)
    q_turned, k_turned = (x[..., pairs] for x in turned)
    cached = torch.full(cache.shape, 7.0)
    written = torch.cat([norm(kv[:, :latent]).detach(), k_turned[0, 0]], -1)
    cached[step.slots.long() // 64, step.slots.long() % 64] = written.to(DTYPES[kv_dtype]).float()
    count = q_part.numel()
    assert_same_bits(got[:count].view(num_rows, heads, rope), q_turned[0].transpose(0, 1))
    got_cache = got[count:].view_as(cached)
    # a value on the edge between two bf16 may fall to the other side: at most 2^-7 of itself
    assert torch.allclose(got_cache, cached, rtol=2**-7 if kv_dtype == "bf16" else 1e-6, atol=1e-6)
    assert_same_bits(got_cache[..., latent:], cached[..., latent:])
