"""What `isthmus run` says of GPUs, word for word: an error if one was asked for, else a warning and an
answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cli.conftest import Here
from engine.stand_in import CPU, GIB, machine
from isthmus.engine import devices, loading
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.engine import Engine
from isthmus.native.handoff import Probe
from isthmus.placement.machine import Machine

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nSee documentation")
NO_DRIVER = "no NVIDIA driver: libcuda.so.1: cannot open shared object file"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 24 GiB, and a torch that can use it."""
    monkeypatch.setattr(Machine, "detect", lambda: machine())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices.handoff, "probe", lambda index: Probe("stream_memops", "they work", (12, 8)))


def refused(here: Here, model: Path, *options: str) -> str:
    done = here("run", model, "ab", "--max-tokens", "2", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("error: ").rstrip("\n")


def warned(here: Here, model: Path) -> str:
    """The first line beside an answer of the CPU's, where nobody asked for a GPU."""
    done = here("run", model, "ab", "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    first, loaded, _ = done.stderr.split("\n", 2)
    assert "cuda" not in loaded
    return first


@pytest.mark.parametrize(
    ("option", "what"),
    [
        (["--device", "cuda:0"], "device cuda:0"),
        (["--strategy", "gpu"], "strategy gpu"),
        (["--gpu-memory", "8GiB"], "gpu_memory"),
    ],
)
def test_no_driver(
    option: list[str], what: str, alphabet_model: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: Machine(8, 64 * GIB, 60 * GIB, gpu_reason=NO_DRIVER))
    assert refused(here, alphabet_model, *option) == (
        f"{what} needs a GPU, and there is none: {NO_DRIVER}; use --strategy cpu, or --device cpu --strategy "
        "hybrid, which runs the split with CPU threads in the GPU's place"
    )


@pytest.mark.usefixtures("card")
def test_a_torch_without_cuda(alphabet_model: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    why = (
        f"cuda:0 is to be used, but torch {torch.__version__} is built without CUDA; install a CUDA build of "
        "torch (see https://pytorch.org), or use --strategy cpu"
    )
    assert refused(here, alphabet_model, "--device", "cuda:0") == why
    assert warned(here, alphabet_model) == f"running on the CPU: {why}"


@pytest.mark.usefixtures("card")
def test_a_driver_that_is_too_old(alphabet_model: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(f"{TOO_OLD}\nPlease update your GPU driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    why = (
        f"cuda:0 is to be used, but torch {torch.__version__} finds no usable GPU: its CUDA 12.8 may need a "
        f"newer driver ({TOO_OLD}); update it, or use --strategy cpu"
    )
    assert refused(here, alphabet_model, "--device", "cuda:0") == why
    assert warned(here, alphabet_model) == f"running on the CPU: {why}"


@pytest.mark.usefixtures("card")
def test_a_device_that_is_not_there_and_one_that_is_too_small(alphabet_model: Path, here: Here) -> None:
    assert refused(here, alphabet_model, "--device", "cuda:1") == (
        "there is no device cuda:1; there are cuda:0 (RTX 4090)"
    )
    assert refused(here, alphabet_model, "--strategy", "gpu", "--gpu-memory", "600MiB") == (
        "not enough GPU memory for strategy gpu: 1.0 GiB are needed (weights 0.0, cache for 4096 tokens 0.0, "
        "working memory 1.0), 0.6 GiB may be used on cuda:0; try 0.4 GiB more, or --strategy cpu"
    )


@pytest.mark.usefixtures("card")
def test_a_card_that_is_full_at_load(
    alphabet_model: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise FULL

    monkeypatch.setattr(loading, "_on_devices", full)
    why = (
        "a GPU's memory was full while the model was loaded (CUDA out of memory. Tried to allocate 20.00 "
        "MiB.); the plan takes cuda:0 1.0 of 23.0 GiB: end what else uses the GPU, or leave room with "
        "--gpu-memory, a shorter --ctx or --strategy hybrid"
    )
    assert refused(here, alphabet_model, "--device", "cuda:0") == why
    assert warned(here, alphabet_model) == f"running on the CPU: {why}"


@pytest.mark.usefixtures("card")
def test_a_card_that_is_full_in_a_step(
    alphabet_model: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Engine.__init__

    def on_stand_in(self: Engine, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **(options | {"stand_ins": {"cuda:0": CPU}}))

    def full(*_: Any, **__: Any) -> None:
        raise FULL

    monkeypatch.setattr(Engine, "__init__", on_stand_in)
    monkeypatch.setattr(DeviceRunner, "_eager", full)
    done = here("run", alphabet_model, "ab", "--max-tokens", "2", "--device", "cuda:0")
    assert done.returncode == 1
    assert done.stdout.strip() == ""
    assert done.stderr.split("\n")[1] == (
        "error: the answer ended early: the step failed: EngineError: a step of 22 rows found no memory left "
        "on its device (CUDA out of memory. Tried to allocate 20.00 MiB.); load the model with a smaller "
        "--chunk, a shorter --ctx, or a lower --gpu-memory"
    )
