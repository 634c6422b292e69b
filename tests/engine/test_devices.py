"""Plans that this process can execute, and what is said of those it cannot."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus import LLM
from isthmus.config import RunOptions
from isthmus.engine import devices
from isthmus.engine.devices import executable_plan
from isthmus.errors import DeviceError, NotEnoughMemoryError, UsageError
from isthmus.native.handoff import Probe
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.weights.dummy import DummySource

GIB = 1 << 30
CARD = Gpu(0, "RTX 4090", 24 * GIB, 23 * GIB, "8.9", 4, 16, driver="570.86.10")
WITH_GPU = Machine(8, 64 * GIB, 60 * GIB, gpus=(CARD,))
WITHOUT = Machine(8, 64 * GIB, 60 * GIB, gpu_reason="no NVIDIA driver")
HYBRID = RunOptions(strategy="hybrid")


@pytest.fixture(scope="module")
def source() -> DummySource:
    return DummySource("dummy:deepseek-v2-lite")


@pytest.fixture
def working_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that says what it would with the card of WITH_GPU and a driver that has everything."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices.handoff, "probe", lambda index: Probe("stream_memops", "they work", (12, 8)))


@pytest.mark.usefixtures("working_cuda")
@pytest.mark.parametrize("strategy", ["hybrid", "gpu", "auto"])
def test_a_gpu_that_works_is_used(source: DummySource, strategy: Any) -> None:
    made = executable_plan(WITH_GPU, source, RunOptions(strategy=strategy))
    assert made.strategy == ("hybrid" if strategy == "hybrid" else "gpu")  # its 9.3 GiB fit
    assert devices.gpus_of(made) == ["cuda:0"]


@pytest.mark.parametrize(
    ("cuda", "says", "said"),
    [
        (None, "", r"cuda:0 is to be used, but torch .* is built without CUDA; install a CUDA build"),
        (
            "12.8",
            "The NVIDIA driver on your system is too old (found version 11040).",
            r"12.8 may need a newer driver \(The NVIDIA driver .* is too old \(found version 11040\)\.\)",
        ),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_found_before_weights_are_read(
    source: DummySource, monkeypatch: pytest.MonkeyPatch, cuda: str | None, says: str, said: str
) -> None:
    def init() -> None:
        raise RuntimeError(says + "\nPlease update your GPU driver")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(DeviceError, match=said):
        executable_plan(WITH_GPU, source, HYBRID)
    assert executable_plan(WITH_GPU, source, RunOptions()).strategy == "cpu"


@pytest.mark.usefixtures("working_cuda")
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (("find_spec", lambda name: None), "triton is missing"),
        (("device_count", lambda: 0), "cuda:0 is to be used, but torch sees none; see CUDA_VISIBLE_DEVICES"),
        (
            ("probe", lambda index: Probe("none", "no host functions", (9, 2))),
            "cannot hand work to the CPU: no h",
        ),
    ],
)
def test_whatever_is_missing_is_said_and_the_cpu_taken_if_nobody_asked_for_more(
    source: DummySource,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: tuple[str, Any],
    said: str,
) -> None:
    name, instead = broken
    owner = {"find_spec": devices.importlib.util, "device_count": torch.cuda, "probe": devices.handoff}[name]
    monkeypatch.setattr(owner, name, instead)
    for asked in (HYBRID, RunOptions(device="cuda:0", strategy="hybrid")):
        with pytest.raises(DeviceError, match=said):
            executable_plan(WITH_GPU, source, asked)
    small = Machine(8, 64 * GIB, 60 * GIB, gpus=(Gpu(0, "RTX 3060", 8 * GIB, 8 * GIB, "8.6"),))
    with caplog.at_level(logging.WARNING):
        assert executable_plan(small, source, RunOptions()).strategy == "cpu"  # hybrid there
    assert any(message.startswith("running on the CPU: cuda:0") for message in caplog.messages)


@pytest.mark.usefixtures("working_cuda")
def test_a_strategy_that_hands_nothing_over_needs_no_hand_off(
    source: DummySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.handoff, "probe", lambda index: pytest.fail("probed"))
    assert executable_plan(WITH_GPU, source, RunOptions(strategy="gpu")).strategy == "gpu"


@pytest.mark.usefixtures("working_cuda")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda:1"}, r"there is no device cuda:1; there are cuda:0 \(RTX 4090\)"),
        ({"kv_dtype": "f32"}, "reads a cache of bf16 or q8_0; leave --kv-dtype f32 out"),
        (
            {"exact_batching": True, "expert_cache": GIB},
            "with --expert-cache other requests would decide .* do not go together",
        ),
        ({"exact_batching": True, "stream_rows": 40}, "with --stream-rows other requests would decide"),
    ],
)
def test_what_a_gpu_has_not_is_refused(source: DummySource, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        executable_plan(WITH_GPU, source, RunOptions(**({"strategy": "hybrid"} | options)))


@pytest.mark.usefixtures("working_cuda")
def test_memory_that_is_too_small_is_refused_with_the_numbers(source: DummySource) -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"12\.1 GiB are needed .* 0\.5 GiB may be used on cuda:0"):
        executable_plan(WITH_GPU, source, RunOptions(strategy="gpu", gpu_memory=GIB // 2))


def test_an_option_for_gpus_is_refused_where_the_cpu_is_taken_instead(source: DummySource) -> None:
    with pytest.raises(UsageError, match="residual_dtype bf16 is for a GPU"):
        executable_plan(WITHOUT, source, RunOptions(residual_dtype="bf16"))


def test_a_strategy_that_needs_a_gpu_is_refused_without_one(
    alphabet_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: WITHOUT)
    with pytest.raises(DeviceError, match="strategy gpu needs a GPU, and there is none: no NVIDIA driver"):
        LLM(alphabet_model, strategy="gpu")
    llm = LLM(alphabet_model, strategy="auto")
    assert llm.engine.plan.strategy == "cpu"
    llm.close()


def test_gpu_memory_limits_what_torch_takes(source: DummySource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the CUDA context, which torch's allocator does not see."""
    asked: list[tuple[float, str]] = []
    properties = SimpleNamespace(total_memory=24 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: properties)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda name: None)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, name: asked.append((share, name))
    )
    options = RunOptions(strategy="hybrid", gpu_memory=12 * GIB)
    stand_ins = {"cuda:0": torch.device("cpu")}
    made = executable_plan(WITH_GPU, source, options, stand_ins=stand_ins)
    devices.limit_memory(made, options, {})
    devices.limit_memory(made, RunOptions(), {})
    devices.limit_memory(made, options, stand_ins)  # nothing to limit
    assert asked == [(0.46875, "cuda:0"), (1.0, "cuda:0")]
