"""Options for devices: what can be meant, what contradicts itself, what the environment adds."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.config import RunOptions, parse_bytes, parse_devices
from isthmus.errors import UsageError


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("cpu", ("cpu",)),
        ("cuda", ("cuda",)),
        ("cuda:0", ("cuda:0",)),
        ("cuda:0,1", ("cuda:0", "cuda:1")),
        ("cuda:3,1", ("cuda:3", "cuda:1")),
        ("cpu:0,1", ("cpu:0", "cpu:1")),
    ],
)
def test_devices_are_torchs_names(text: str, devices: tuple[str, ...]) -> None:
    assert parse_devices("device", text) == devices
    assert RunOptions(device=text, strategy="hybrid").devices == devices


@pytest.mark.parametrize(
    "text", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0,", "cuda:1,1", "cuda:00001", "rocm:0"]
)
def test_a_device_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(UsageError, match="device"):
        RunOptions(device=text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 << 30),
        ("20GB", 20 * 10**9),
        ("20G", 20 << 30),
        ("1.5 GiB", 3 << 29),
        ("512m", 512 << 20),
        ("4096", 4096),
        ("4096B", 4096),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_bytes("gpu_memory", text) == nbytes
    assert RunOptions.from_kwargs(gpu_memory=text).gpu_memory == nbytes


@pytest.mark.parametrize("text", ["", "all", "20 gigs", "-1GiB", "0", "9999999TB", "GiB", "1e9", "20GiBs"])
def test_a_size_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(UsageError, match="gpu_memory must be"):
        RunOptions.from_kwargs(gpu_memory=text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "fast"}, "strategy must be one of auto, cpu, stream, hybrid, gpu, got 'fast'"),
        ({"strategy": "cpu", "device": "cuda:0"}, "strategy cpu uses no GPU, but the device is cuda:0"),
        ({"strategy": "cpu", "gpu_memory": 1 << 30}, "so gpu_memory limits nothing"),
        ({"strategy": "cpu", "kv_ram": 1 << 30}, "strategy cpu has its cache in RAM: leave one of them out"),
        ({"kv_ram": 0}, "kv_ram must be a whole number from 1"),
        ({"device": "cpu:0,1"}, "device cpu:0,1 is for a split between CPU threads and CPU threads"),
        ({"device": "cpu", "gpu_memory": 1 << 30}, "device cpu with gpu_memory is for a split"),
        ({"residual_dtype": "f16"}, "residual_dtype must be one of bf16, f32"),
        ({"strategy": "cpu", "residual_dtype": "bf16"}, "residual_dtype bf16 is for a GPU"),
        (
            {"device": "cpu", "strategy": "hybrid", "residual_dtype": "bf16"},
            "residual_dtype bf16 is for a GPU",
        ),
        ({"gpu_memory": 2.5}, "gpu_memory must be a whole number"),
        ({"device": 0}, "device must be cpu, cuda, cuda:0 or cuda:0,1, got 0"),
        ({"strategy": "cpu", "overlap": True}, "overlap is about experts .* strategy cpu shares none"),
        ({"overlap": 1}, "overlap must be True or False"),
    ],
)
def test_options_that_contradict_themselves(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RunOptions.from_kwargs(**options)


def test_the_environment_names_a_device_where_nobody_else_does() -> None:
    environ = {"ISTHMUS_DEVICE": "cuda:1"}
    assert RunOptions().with_environment(environ).device == "cuda:1"
    assert RunOptions(device="cpu").with_environment(environ).device == "cpu"
    assert RunOptions(strategy="cpu").with_environment(environ).device is None
    assert RunOptions().with_environment({"ISTHMUS_DEVICE": ""}).device is None
    with pytest.raises(UsageError, match="ISTHMUS_DEVICE must be cpu, cuda"):
        RunOptions().with_environment({"ISTHMUS_DEVICE": "0"})


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ({}, False),
        ({"strategy": "cpu"}, False),
        ({"strategy": "hybrid"}, True),
        ({"device": "cuda"}, True),
        ({"gpu_memory": 1 << 30}, True),
        ({"device": "cpu", "strategy": "hybrid"}, False),
    ],
)
def test_whether_the_cpu_alone_would_not_be_what_was_said(options: dict[str, Any], asks: bool) -> None:
    assert RunOptions(**options).asks_for_gpu is asks
