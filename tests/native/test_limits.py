"""The loops that products are measured against: they run everywhere, and leave the threads as they were."""

from __future__ import annotations

import numpy as np
import pytest
from random_weights import random_weight

from isthmus import native


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("policy", ["int8", "bf16"])
def test_every_instruction_set_has_a_rate(isa: str, policy: str) -> None:
    native.use_isa(isa)
    assert 0 < native.multiply_gops(policy, 0.0) < 1e9


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="policy must be int8 or bf16, got 'int4'"):
        native.multiply_gops("int4", 0.0)


@pytest.mark.parametrize("isa", native.isa_names())
def test_products_are_the_same_after_a_measurement(isa: str) -> None:
    """The matrix unit's tiles and the pool's scratch memory are used by both."""
    native.use_isa(isa)
    weight = random_weight("q8_0", 1, 64, 256, seed=1).packed
    linear = native.Linear([weight])
    x = np.random.default_rng(0).standard_normal((32, 256), dtype=np.float32)

    def product() -> np.ndarray:
        out = np.empty((32, 64), np.float32)
        linear(x.ctypes.data, 32, 256, out.ctypes.data, 64)
        return out

    before = product()
    native.multiply_gops("int8", 0.0)
    native.multiply_gops("bf16", 0.0)
    np.testing.assert_array_equal(product(), before)
