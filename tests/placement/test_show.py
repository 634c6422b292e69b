"""A plan as people read it."""

import pytest
from rich.console import Console

from isthmus.config import RunOptions
from isthmus.errors import UsageError
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.placement.plan import Plan, plan
from isthmus.weights.dummy import DummySource

GIB = 1 << 30
CARD = Gpu(0, "RTX 4090", 24 * GIB, 23 * GIB, "8.9", 4, 16, memory_gb_s=1008.0)


@pytest.fixture(scope="module")
def made() -> Plan:
    machine = Machine(32, 512 * GIB, 500 * GIB, read_gb_s=300.0, gpus=(CARD,))
    return plan(machine, DummySource("dummy:deepseek-v3"), RunOptions())


def test_one_line_a_device_and_the_estimate_is_called_one(made: Plan) -> None:
    lines = str(made).splitlines()
    assert lines[0].startswith("strategy hybrid: 378.0 GiB of weights, context 8,192 tokens")
    gpu = next(line for line in lines if line.startswith("cuda:0"))
    assert gpu.split()[1:6] == ["layers", "0-60,", "token_embd,", "output_norm,", "output"]
    assert gpu.split()[-1] == "23.00"
    assert next(line for line in lines if line.startswith("host")).split()[1:7] == [
        "experts", "of", "58", "layers", "0.00", "366.93",
    ]  # fmt: skip
    assert any(line.startswith("estimate, not measured: 13.") for line in lines)


def test_rich_prints_the_same_cells(made: Plan) -> None:
    console = Console(width=160, record=True, file=None, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(made)
    plain = str(made).split()
    assert [word for word in captured.get().split() if word] == plain


def test_a_plan_without_bandwidths_says_what_is_not_known() -> None:
    machine = Machine(8, 64 * GIB, 60 * GIB)
    text = str(plan(machine, DummySource("dummy:deepseek-v2-lite"), RunOptions()))
    assert "no estimate of all speeds: not known is RAM's read bandwidth" in text


@pytest.mark.parametrize("text", ["", "{}", '{"strategy": 3}', "[]"])
def test_what_is_no_plan_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="this is no plan"):
        Plan.from_json(text)
