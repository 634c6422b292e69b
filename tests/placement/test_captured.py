"""Captured decode steps: which there are, and that a plan counts what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isthmus.config import RunOptions
from isthmus.gpu import decode, launch
from isthmus.placement.captured import GRAPH_BYTES, captured_bytes, decode_buckets, decode_bytes, split_bytes
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.placement.plan import plan
from isthmus.weights.dummy import DummySource
from isthmus.weights.shapes import SHAPES

GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, [1]),
        ({"parallel": 2}, [1, 2]),
        ({"parallel": 5}, [1, 2, 4, 8]),
        ({"parallel": 8}, [1, 2, 4, 8]),
        ({"parallel": 100}, [1, 2, 4, 8, 16, 32]),
        ({"speculate": "ngram"}, [1, 2, 4, 8, 16, 32]),
    ],
)
def test_buckets_reach_as_far_as_requests_and_drafts(options: dict[str, Any], rows: list[int]) -> None:
    assert decode_buckets(RunOptions(**options)) == rows


# name: (query heads, kv heads, width of a value or latent, rope of a latent), of the published config.json
ATTENTION = {
    "qwen3-30b-a3b": (32, 4, 128, 0),
    "mixtral-8x7b": (32, 8, 128, 0),
    "glm-4.5": (96, 8, 128, 0),
    "deepseek-v3": (128, 1, 512, 64),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_states_of_attention_are_counted_as_the_kernel_asks_for_them(name: str) -> None:
    """Exactly, for a context of more blocks than splits."""
    heads, kv_heads, dim, rope = ATTENTION[name]
    asked: list[int] = []

    def note(kernel: Any, args: tuple[Any, ...], *_: Any) -> None:
        if kernel is decode._decode_split:
            asked.append(sum(part.nbytes for part in args[6:8]))

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, blocks = 3, 200
    where = [meta(rows, dtype=torch.int32), meta(rows, dtype=torch.int32)]
    tables = meta(rows, blocks, dtype=torch.int32)
    with launch.recorded(note):
        if rope:
            decode.mla_decode(
                meta(rows, heads, dim + rope), meta(9, 64, dim + rope), rope, *where, tables, 1.0
            )
        else:
            caches = [meta(9, kv_heads, 64, dim) for _ in range(2)]
            decode.decode(meta(rows, heads, dim), *caches, *where, tables, 1.0)
    assert asked == [rows * split_bytes(DummySource(f"dummy:{name}").metadata)]


def test_every_built_in_shape_has_a_bound() -> None:
    for name in SHAPES:
        assert 0 < split_bytes(DummySource(f"dummy:{name}?layers=1").metadata) <= 16 << 20


def test_the_plan_of_a_gpu_counts_them() -> None:
    """DeepSeek-V3 for 8 requests: logits of 15 rows of 129280; states of 32 for any number of them."""
    card = Gpu(0, "RTX 4090", 24 * GIB, 23 * GIB, "8.9", 4, 16, driver="570.86.10")
    machine, source = Machine(32, 512 * GIB, 512 * GIB, gpus=(card,)), DummySource("dummy:deepseek-v3")
    scratch = {}
    for parallel in (1, 8):
        options = RunOptions(strategy="hybrid", parallel=parallel, context_tokens=4096)
        scratch[parallel] = plan(machine, source, options).devices[0].scratch_bytes
    a_row = 4 * (129280 + 2 * 7168 + 64 + 8)
    beside_prompts = 7 * 4 * 129280  # logits of answers in steps that are not captured
    assert scratch[8] - scratch[1] == 3 * GRAPH_BYTES + 14 * a_row + beside_prompts
    assert decode_bytes(source.metadata) == 32 * 128 * 32 * (512 + 2) * 4
    options = RunOptions(strategy="stream", parallel=8, context_tokens=4096)  # which captures none
    without = plan(machine, source, options).devices[0].scratch_bytes
    streamed = captured_bytes(source.metadata, RunOptions(), 4096)
    assert without == scratch[1] - streamed + beside_prompts
