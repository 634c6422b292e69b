"""Plans that this process can execute, and what is said of those it cannot."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from isthmus import LLM
from isthmus.config import RunOptions
from isthmus.engine import devices
from isthmus.engine.devices import executable_plan
from isthmus.errors import DeviceError
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.weights.dummy import DummySource

GIB = 1 << 30
CARD = Gpu(0, "RTX 4090", 24 * GIB, 23 * GIB, "8.9", 4, 16, driver="570.86.10")
WITH_GPU = Machine(8, 64 * GIB, 60 * GIB, gpus=(CARD,))
WITHOUT = Machine(8, 64 * GIB, 60 * GIB, gpu_reason="no NVIDIA driver")


@pytest.fixture(scope="module")
def source() -> DummySource:
    return DummySource("dummy:deepseek-v2-lite")


@pytest.mark.parametrize("options", [{"strategy": "hybrid"}, {"device": "cuda:0"}, {"gpu_memory": 20 * GIB}])
def test_a_strategy_that_is_not_executed_yet_is_refused_if_it_was_asked_for(
    source: DummySource, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "EXECUTABLE", ("cpu",))
    with pytest.raises(DeviceError, match=r"strategy (hybrid|gpu) is planned but not executed yet"):
        executable_plan(WITH_GPU, source, RunOptions(**options))  # type: ignore[arg-type]


def test_a_gpu_nobody_asked_for_leaves_the_cpu_and_a_warning(
    source: DummySource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "EXECUTABLE", ("cpu",))
    with caplog.at_level(logging.WARNING):
        made = executable_plan(WITH_GPU, source, RunOptions())
    assert made.strategy == "cpu"
    assert caplog.messages == [
        "running on the CPU: strategy gpu is planned but not executed yet; this version runs cpu: use "
        "--strategy cpu"
    ]


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        (None, r"cuda:0 is to be used, but torch .* is built without CUDA; install a CUDA build"),
        ("12.8", r"torch .* finds no usable GPU: its CUDA 12.8 may need a newer driver"),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_found_before_weights_are_read(
    source: DummySource, monkeypatch: pytest.MonkeyPatch, cuda: str | None, said: str
) -> None:
    monkeypatch.setattr(devices, "EXECUTABLE", ("cpu", "stream", "hybrid", "gpu"))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=said):
        executable_plan(WITH_GPU, source, RunOptions(strategy="hybrid"))
    assert executable_plan(WITH_GPU, source, RunOptions()).strategy == "cpu"


def test_a_strategy_that_needs_a_gpu_is_refused_without_one(
    alphabet_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: WITHOUT)
    with pytest.raises(DeviceError, match="strategy gpu needs a GPU, and there is none: no NVIDIA driver"):
        LLM(alphabet_model, strategy="gpu")
    llm = LLM(alphabet_model, strategy="auto")
    assert llm.engine.plan.strategy == "cpu"
    llm.close()
