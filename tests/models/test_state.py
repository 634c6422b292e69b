"""A step's rows and the memory behind them: what is refused, and what memory costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.config import BLOCK_TOKENS
from isthmus.engine.batch import Batch
from isthmus.engine.state import PagedKeyValue, PagedLatent, State, bytes_per_block


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Two sequences: tokens 62 to 64 of the first, which cross into its second block, and token 5 of the second.
GOOD = Batch(
    tokens=rows(7, 8, 9, 3),
    positions=rows(62, 63, 64, 5),
    sequences=rows(0, 0, 0, 1),
    slots=rows(2 * BLOCK_TOKENS + 62, 2 * BLOCK_TOKENS + 63, 0, BLOCK_TOKENS + 5),
    block_tables=torch.tensor([[2, 0], [1, 0]], dtype=torch.int32),
    logit_rows=rows(2, 3),
)


def test_a_good_batch_passes() -> None:
    GOOD.prepare(vocab_size=10, num_blocks=3)
    replace(GOOD, logit_rows=rows()).prepare(vocab_size=10, num_blocks=3)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("tokens", rows(7, 8, 10, 3), "tokens holds 3..10; needs 0..9"),
        ("tokens", rows(7, 8, -1, 3), "tokens holds -1..8"),
        ("tokens", torch.tensor([7, 8, 9, 3]), "torch.int64"),
        ("positions", rows(62, 63, 64, 128), r"row 3: position 128 is outside \[0, 128\)"),
        ("positions", rows(62, 63, 64), r"positions is torch.int32 \(3,\)"),
        ("sequences", rows(0, 0, 0, 2), r"row 3: sequence 2 is outside \[0, 2\)"),
        ("slots", rows(0, 1, 2, 3 * BLOCK_TOKENS), r"row 3: slot 192 is outside \[0, 192\)"),
        ("slots", rows(0, 9, 1, 9, 2, 9, 3, 9)[::2], "needs contiguous"),
        ("block_tables", torch.tensor([[2, 3], [1, 0]], dtype=torch.int32), "row 2: block of its sequence 3"),
        ("block_tables", rows(2, 1), r"block_tables \(2,\); needs both"),
        ("logit_rows", rows(2, 4), "logit_rows holds 2..4; needs 0..3"),
    ],
)
def test_a_bad_batch_is_refused_by_field(field: str, value: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(GOOD, **{field: value}).prepare(vocab_size=10, num_blocks=3)


def test_a_block_of_deepseek_v3_and_of_a_grouped_query_layer() -> None:
    """576 values a token for all heads of MLA; two of each kv head otherwise. bf16 takes 2 bytes."""
    assert bytes_per_block([PagedLatent(576)] * 61, "bf16") == 61 * 576 * 64 * 2
    assert bytes_per_block([PagedKeyValue(kv_heads=4, head_dim=128)], "f32") == 2 * 4 * 128 * 64 * 4
    # q8_0: 34 bytes for 32 values
    assert bytes_per_block([PagedLatent(576)] * 61, "q8_0") == 61 * 64 * 18 * 34
    assert bytes_per_block([PagedKeyValue(kv_heads=4, head_dim=128)], "q8_0") == 2 * 4 * 64 * 4 * 34
    assert bytes_per_block([PagedKeyValue(kv_heads=1, head_dim=80)], "q8_0") == 2 * 64 * (80 + 3 * 2)


def test_state_has_the_shapes_the_kernels_read() -> None:
    state = State([PagedKeyValue(2, 32), PagedLatent(96)], num_blocks=5, kv_dtype="bf16")
    keys_values, latent = state.layers
    assert keys_values.keys.shape == keys_values.values.shape == (5, 2, BLOCK_TOKENS, 32)  # type: ignore[attr-defined]
    assert latent.latent.shape == (5, BLOCK_TOKENS, 96)  # type: ignore[attr-defined]
    assert latent.latent.dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert not latent.latent.any()  # type: ignore[attr-defined]


def test_a_q8_0_state_is_bytes() -> None:
    state = State([PagedKeyValue(2, 32), PagedLatent(96)], num_blocks=5, kv_dtype="q8_0")
    keys_values, latent = state.layers
    assert keys_values.keys.shape == keys_values.values.shape == (5, 2, BLOCK_TOKENS * 34)  # type: ignore[attr-defined]
    assert latent.latent.shape == (5, BLOCK_TOKENS * 3 * 34)  # type: ignore[attr-defined]
    assert latent.latent.dtype == torch.uint8  # type: ignore[attr-defined]
    (elsewhere,) = State([PagedLatent(96)], 5, "q8_0", [torch.device("meta")]).layers
    assert elsewhere.latent.shape == (6, BLOCK_TOKENS * 3 * 34)  # type: ignore[attr-defined] # a spare block
    assert (elsewhere.latent.device.type, elsewhere.latent.dtype) == ("meta", torch.uint8)  # type: ignore[attr-defined]
