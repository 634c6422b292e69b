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
    kernels,
    linear,
    mla,
    prefill,
    reference,
    reference_attention,
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
]


@pytest.mark.parametrize(("kernel", "plain"), PAIRS, ids=[kernel.__name__ for kernel, _ in PAIRS])
def test_kernel_and_reference_take_the_same(kernel: Callable[..., Any], plain: Callable[..., Any]) -> None:
    ours, theirs = (inspect.signature(f).parameters.values() for f in (kernel, plain))
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]


def test_both_have_all_of_them_under_the_same_names() -> None:
    assert kernels.__all__ == reference_kernels.__all__ == sorted(kernel.__name__ for kernel, _ in PAIRS)
    for kernel, plain in PAIRS:
        assert getattr(kernels, kernel.__name__) is kernel
        assert getattr(reference_kernels, kernel.__name__) is plain
