"""Under `exact_batching` a row has the same bits alone and among others: each kernel of it, interpreted.

On a card a program of one compiled kernel does for a row what it does for any other, wherever it stands; that
the wrappers ask for one kernel, one tile and one order for every row count is what is held here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu.kit import bf16, randn, random_weight, relative_error, strided
from isthmus.gpu import fixed, fixed_kernels, kernels, reference_fixed
from isthmus.gpu.launch import recorded
from isthmus.gpu.tiles import GPU_FORMATS

ROWS = 21  # more than one tile of 16, and more than 8 rows
Rows = Callable[[slice], Tensor]


def check_alone(of: Rows, rows: int = ROWS) -> None:
    """of(which): the results of these rows, computed in one call."""
    together = of(slice(0, rows))
    assert together.shape[0] == rows
    for part in (slice(0, 1), slice(rows - 2, rows - 1), slice(1, rows // 2), slice(2, rows)):
        assert torch.equal(of(part), together[part]), part


def differ(of: Rows, rows: int = ROWS) -> bool:
    """Whether the rows alone are others than among all: so that `check_alone` can fail."""
    together = of(slice(0, rows))
    return any(not torch.equal(of(slice(t, t + 1)), together[t : t + 1]) for t in range(rows))


@pytest.mark.parametrize("module", [fixed_kernels, reference_fixed])
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_a_product_with_tiles(name: str, module: object) -> None:
    weight, x = random_weight(name, 41, 512), strided(bf16(ROWS, 512, seed=1))
    residual, bias = bf16(ROWS, 41, seed=2), randn(41, seed=3)

    def of(which: slice, how: object = module) -> Tensor:
        out = torch.empty(len(x[which]), 41)
        return how.linear(x[which], weight.packed, out, bias=bias, residual=residual[which])  # type: ignore

    check_alone(of)
    wanted = weight.product(x) + bias + residual
    assert relative_error(of(slice(0, ROWS)), wanted) < 3e-3  # of weights rounded to bf16: test_linear
    if module is fixed_kernels:
        assert differ(lambda which: of(which, kernels))


def test_a_prompt_of_many_rows_is_not_multiplied_otherwise() -> None:
    """Beyond the rows from which weights are dequantised else."""
    weight, x = random_weight("q8_0", 16, 32), bf16(520, 32, seed=1)
    together = fixed_kernels.linear(x, weight.packed, torch.empty(520, 16))
    assert torch.equal(fixed_kernels.linear(x[519:], weight.packed, torch.empty(1, 16)), together[519:])
    launched: list[str] = []
    with recorded(lambda kernel, *_: launched.append(kernel.__name__)):
        fixed_kernels.ffn(x, *[random_weight("q8_0", 32, 32).packed] * 3)
    assert launched == ["_gate_up", "_linear"]


@pytest.mark.parametrize("module", [fixed_kernels, reference_fixed])
def test_experts_and_an_ffn(module: object) -> None:
    gate, up, down = (random_weight("q8_0", 32, 32, experts=3, seed=seed) for seed in (1, 2, 3))
    x, weights = bf16(ROWS, 32, seed=4), randn(ROWS, 2, seed=5).abs()
    ids = torch.stack(
        [torch.randperm(4, generator=torch.Generator().manual_seed(t))[:2] for t in range(ROWS)]
    )
    ids, slot_of = ids.int(), torch.tensor([1, -1, 0, 2], dtype=torch.int32)

    def of(which: slice, how: object = module) -> Tensor:
        matrices = (gate.packed, up.packed, down.packed)
        out = torch.empty(len(x[which]), 32)
        return how.experts(x[which], ids[which], weights[which], slot_of, *matrices, out)  # type: ignore

    def dense(which: slice, how: object = module) -> Tensor:
        one = [matrix.packed.expert(1) for matrix in (gate, up, down)]
        return how.ffn(x[which], *one, torch.empty(len(x[which]), 32))  # type: ignore

    for one in (of, dense):
        check_alone(one)
        if module is fixed_kernels:
            assert differ(lambda which, one=one: one(which, kernels))
            assert relative_error(one(slice(0, ROWS)), one(slice(0, ROWS), reference_fixed)) < 8e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_with_plain_weights(dtype: torch.dtype, transposed: bool) -> None:
    """Three matrices, 70 outputs of 130 columns: no multiples of a tile; strided as kv_b's halves are."""
    weights, x = randn(3, 70, 130, seed=1).to(dtype), randn(3, ROWS, 130, seed=2)
    if transposed:
        weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
        x = x.transpose(0, 1).contiguous().transpose(0, 1)

    def of(which: slice) -> Tensor:
        return fixed.batched_f32(x[:, which], weights).transpose(0, 1)

    check_alone(of)
    wanted = x.to(dtype).double() @ weights.double().transpose(1, 2)
    assert relative_error(of(slice(0, ROWS)).transpose(0, 1), wanted) < 2e-6  # sums of 130 products in fp32
    mine = reference_fixed.batched_f32(x, weights)
    assert relative_error(mine, wanted) < 2e-6
    assert torch.equal(fixed.product_f32(x[1], weights[1]), fixed.batched_f32(x, weights)[1])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"weights are torch.float32 \(1, 4, 5\); need bf16 or fp32 \[1, N, 6\]"
    ):
        fixed.product_f32(randn(2, 6, seed=0), randn(4, 5, seed=0))


def test_attention_of_decodes_and_of_a_chunk_as_decodes() -> None:
    """A split's share follows from the row's own length, the number of splits from the tables' width."""
    keys, values = (bf16(9, 1, 64, 16, seed=seed) for seed in (1, 2))
    rows = 5
    q, latent = bf16(rows, 2, 16, seed=3), bf16(9, 64, 24, seed=4)
    tables = torch.tensor([[4, 2], [1, 8]], dtype=torch.int32)
    positions = torch.arange(62, 62 + rows, dtype=torch.int32)  # a chunk that begins in its first block
    sequences = (torch.arange(rows) % 2).int()

    def of(which: slice) -> Tensor:
        where = (sequences[which].clone(), positions[which].clone(), tables)
        gqa = fixed_kernels.decode(q[which], keys, values, *where, 0.3)
        wide = torch.cat([q[which], q[which, :, :8]], 2)
        mla = fixed_kernels.mla_decode(wide, latent, 8, *where, 0.3)
        return torch.cat([gqa.flatten(1), mla.flatten(1)], 1)

    check_alone(of, rows)


def test_operators_on_rows() -> None:
    x, weight, logits = bf16(ROWS, 96, seed=1), randn(96, seed=2), randn(ROWS, 16, seed=3)
    parts, weights = randn(ROWS, 3, 40, seed=4), randn(ROWS, 3, seed=5)

    def of(which: slice) -> Tensor:
        normed = fixed_kernels.rms_norm(x[which], weight, 1e-6)
        acted = fixed_kernels.act_mul(x[which], x[which])
        ids, chosen = fixed_kernels.route(logits[which], 4, scoring="sigmoid", normalise=True)
        summed = fixed_kernels.weighted_sum(
            parts[which], weights[which], None, torch.empty(len(x[which]), 40)
        )
        return torch.cat([normed.float(), acted.float(), ids.float(), chosen, summed], 1)

    check_alone(of)
