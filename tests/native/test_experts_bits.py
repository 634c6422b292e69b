"""The fused experts operator: the same bits with any threads, on every instruction set, in any batch."""

from __future__ import annotations

import pytest
import torch
from blocks import kernels
from experts_kit import SHARED_F, E, F, Ffn, H, call, make_ffn, make_input
from random_weights import oracle_isa

from isthmus import native

MIXED = ("q4_k", "q5_0", "q6_k")
MIXED_SHARED = ("q8_0", "bf16", "q4_1")


@pytest.fixture(scope="module")
def mixed() -> tuple[Ffn, Ffn]:
    return make_ffn(MIXED, E, H, F), make_ffn(MIXED_SHARED, 1, H, SHARED_F)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 90])
def test_any_number_of_threads_gives_the_same_bits(mixed: tuple[Ffn, Ffn], tokens: int, exact: bool) -> None:
    given = make_input(tokens, 3)
    op = native.Experts(*mixed[0].packed, shared=mixed[1].packed, exact=exact)
    native.set_threads(1)
    expected = call(op, given)
    for threads in (2, 3, 4, 5, 6, 7, 31, 64):
        native.set_threads(threads)
        assert torch.equal(call(op, given), expected), f"{threads} threads"


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_the_order_in_which_a_core_reads_experts_changes_no_bit(mixed: tuple[Ffn, Ffn], tokens: int) -> None:
    """It is the CPU's vendor's to say: both on every machine. Of 40 tokens with 3 choices and a shared expert
    each the caller does not sum the outputs alone."""
    given = make_input(tokens, 3)
    op = native.Experts(*mixed[0].packed, shared=mixed[1].packed)
    usual = kernels.read_one_stream(True)
    try:
        for threads in (1, 2, 5):
            native.set_threads(threads)
            one_stream = call(op, given)
            kernels.read_one_stream(False)
            assert torch.equal(call(op, given), one_stream), f"{threads} threads"
            kernels.read_one_stream(True)
    finally:
        kernels.read_one_stream(usual)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 90])
def test_every_instruction_set_gives_the_same_bits(mixed: tuple[Ffn, Ffn], tokens: int, exact: bool) -> None:
    given = make_input(tokens, 3)
    op = native.Experts(*mixed[0].packed, shared=mixed[1].packed, exact=exact)
    for isa in native.isa_names():
        native.use_isa(oracle_isa(isa, exact))
        expected = call(op, given)
        native.use_isa(isa)
        assert torch.equal(call(op, given), expected), isa


@pytest.mark.parametrize("tokens", [2, 7, 33, 200])
def test_exact_batch_equals_each_token_alone(mixed: tuple[Ffn, Ffn], tokens: int) -> None:
    given = make_input(tokens, 3)
    op = native.Experts(*mixed[0].packed, shared=mixed[1].packed, exact=True)
    alone = torch.cat([call(op, given.rows(slice(t, t + 1))) for t in range(tokens)])
    assert torch.equal(call(op, given), alone)


def test_without_exact_few_rows_per_expert_still_equal_each_token_alone(mixed: tuple[Ffn, Ffn]) -> None:
    given = make_input(8, 3)  # at most 8 rows an expert: the same driver as for one
    op = native.Experts(*mixed[0].packed, shared=mixed[1].packed)
    alone = torch.cat([call(op, given.rows(slice(t, t + 1))) for t in range(8)])
    assert torch.equal(call(op, given), alone)
