"""A caller may take a kernel or its reference: the arguments are the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from isthmus.gpu import (
    activation,
    decode,
    embedding,
    experts,
    fixed,
    fixed_kernels,
    kernels,
    linear,
    mla,
    plain,
    prefill,
    reference,
    reference_attention,
    reference_fixed,
    reference_kernels,
    reference_rows,
    rope,
    router,
    rows,
)

PAIRS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (linear.linear, reference.linear),
    (embedding.embed, reference.embed),
    (experts.ffn, reference.ffn),
    (experts.experts, reference.experts),
    (rows.rms_norm, reference_rows.rms_norm),
    (rows.weighted_sum, reference_rows.weighted_sum),
    (activation.act_mul, reference_rows.act_mul),
    (router.route, reference_rows.route),
    (rope.rope_write, reference_attention.rope_write),
    (rope.latent_write, reference_attention.latent_write),
    (decode.decode, reference_attention.decode),
    (decode.mla_decode, reference_attention.mla_decode),
    (prefill.prefill, reference_attention.prefill),
    (mla.mla_prefill, reference_attention.mla_prefill),
    (plain.product_f32, plain.product_f32),  # torch's, on a card too
    (plain.batched_f32, plain.batched_f32),
]
FIXED = [(fixed.product_f32, plain.product_by_row), (fixed.batched_f32, plain.batched_by_row)]
CHUNKS = {"prefill", "mla_prefill"}  # exact_batching has none


@pytest.mark.parametrize(
    ("kernel", "other"), PAIRS + FIXED, ids=[kernel.__name__ for kernel, _ in PAIRS + FIXED]
)
def test_kernel_and_reference_take_the_same(kernel: Callable[..., Any], other: Callable[..., Any]) -> None:
    ours, theirs = (inspect.signature(f).parameters.values() for f in (kernel, other))
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]


def test_both_have_all_of_them_under_the_same_names() -> None:
    assert kernels.__all__ == reference_kernels.__all__ == sorted(kernel.__name__ for kernel, _ in PAIRS)
    for kernel, other in PAIRS:
        assert getattr(kernels, kernel.__name__) is kernel
        assert getattr(reference_kernels, kernel.__name__) is other


def test_those_of_exact_batching_are_the_same_but_for_chunks() -> None:
    names = [name for name in kernels.__all__ if name not in CHUNKS]
    assert fixed_kernels.__all__ == reference_fixed.__all__ == names
    for name in ("linear", "ffn", "experts"):
        for module, of in ((fixed_kernels, kernels), (reference_fixed, reference_kernels)):
            made = getattr(module, name)
            assert (made.func, made.keywords) == (getattr(of, name), {"fixed": True})
    for kernel, other in FIXED:
        assert getattr(fixed_kernels, kernel.__name__) is kernel
        assert getattr(reference_fixed, kernel.__name__) is other
    for name in ("decode", "rms_norm", "route", "weighted_sum", "rope_write", "embed"):
        assert getattr(fixed_kernels, name) is getattr(kernels, name)
        assert getattr(reference_fixed, name) is getattr(reference_kernels, name)
