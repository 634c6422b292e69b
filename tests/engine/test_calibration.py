"""From how many rows on an expert streams: the design's formula, and what it is fed with."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.config import RunOptions
from isthmus.engine.calibration import ROWS, measure, rows_worth_streaming
from isthmus.models.base import load_model
from isthmus.modules.ring import ExpertRing
from isthmus.modules.split import ExpertSplit
from isthmus.modules.streamed import NEVER, Streaming
from isthmus.weights.source import open_weights
from models import tiny


@pytest.mark.parametrize(
    ("bits", "cpu_ops_s", "link_bytes_s", "rows"),
    [
        (4.5, 40e12, 25e9, 450),  # Q4_K, a server's AMX, PCIe 4.0 x16: for DeepSeek-V3 14,400 tokens
        (4.5, 3.3e12, 25e9, 38),  # one AMX core
        (8.5, 0.5e12, 50e9, 6),
        (4.5, 1e9, 50e9, 1),  # a CPU that is slower than the copy even for one row
    ],
)
def test_the_formula(bits: float, cpu_ops_s: float, link_bytes_s: float, rows: int) -> None:
    """Both take equally long there: 2 rows weights / ops = weights bits / 8 / bytes."""
    assert rows_worth_streaming(bits, cpu_ops_s, link_bytes_s) == rows
    if rows > 1:
        assert 2 * (rows - 1) / cpu_ops_s < bits / 8 / link_bytes_s <= 2 * rows / cpu_ops_s


def test_it_is_fed_with_one_expert_of_the_cpu_and_one_stage_of_the_ring(tmp_path: Path) -> None:
    case = tiny.CASES["qwen3moe"]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))
    split = ExpertSplit("inline", 512, streaming=Streaming(NEVER), ring=ExpertRing(3, 4))
    load_model(open_weights(path), RunOptions(threads=2), split=split)
    times = iter([10.0, 10.5, 20.0, 20.25])  # half a second for the CPU, a quarter for 4 experts
    num_weights = 3 * 64 * 32
    cpu_ops_s, link_bytes_s = 2 * num_weights * ROWS / 0.5, 4 * num_weights * 4 / 0.25
    assert measure(split, lambda: next(times)) == rows_worth_streaming(32, cpu_ops_s, link_bytes_s) == 32
    assert split.use().streamed == 0  # nothing of a request
    split.close()
