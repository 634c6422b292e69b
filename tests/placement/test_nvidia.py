"""Detection of NVIDIA GPUs against a driver made of Python: the calls as the libraries have them."""

from __future__ import annotations

import subprocess
from typing import Any, ClassVar

import pytest

from isthmus.placement.nvidia import Gpu, detect_gpus

GIB = 1 << 30


class Nvml:
    """libnvidia-ml with two cards; functions take ctypes references, as the real ones do."""

    CARDS: ClassVar = {
        b"0000:01:00.0": {
            "name": b"NVIDIA GeForce RTX 4090",
            "capability": (8, 9),
            "clock": 10501,
            "bus": 384,
        },
        b"0000:02:00.0": {"name": b"NVIDIA RTX A2000", "capability": (8, 6), "clock": 6001, "bus": 192},
    }

    def __init__(self, init: int = 0) -> None:
        self._init = init
        self.ended = 0

    def nvmlInit_v2(self) -> int:
        return self._init

    def nvmlShutdown(self) -> int:
        self.ended += 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Any, handle: Any) -> int:
        handle._obj.value = 1 + list(self.CARDS).index(bus_id.value)
        return 0

    def _card(self, handle: Any) -> dict[str, Any]:
        return list(self.CARDS.values())[handle.value - 1]

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: int) -> int:
        name.value = self._card(handle)["name"]
        return 0

    def nvmlSystemGetDriverVersion(self, version: Any, size: int) -> int:
        version.value = b"570.86.10"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 24 * GIB, 20 * GIB
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._card(handle)["capability"]
        return 0

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, clock: Any) -> int:
        assert kind == 2  # memory
        clock._obj.value = self._card(handle)["clock"]
        return 0

    def nvmlDeviceGetMemoryBusWidth(self, handle: Any, bits: Any) -> int:
        bits._obj.value = self._card(handle)["bus"]
        return 0

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, generation: Any) -> int:
        generation._obj.value = 4
        return 0

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, width: Any) -> int:
        return 3  # NVML_ERROR_NOT_SUPPORTED, as on some virtual machines


class Cuda:
    """libcuda, whose order of devices is its own."""

    def __init__(self, *bus_ids: bytes, init: int = 0) -> None:
        self._bus_ids = bus_ids
        self._init = init

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._bus_ids)
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: int) -> int:
        text.value = self._bus_ids[device]
        return 0


def libraries(**found: Any) -> Any:
    def load(name: str) -> Any:
        library = found.get(name.split(".")[0].replace("-", "_"))
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    return load


def no_smi(command: list[str]) -> str:
    raise FileNotFoundError(command[0])


def test_devices_stand_in_cudas_order_with_what_nvml_knows() -> None:
    nvml = Nvml()
    gpus, reason = detect_gpus(
        libraries(libnvidia_ml=nvml, libcuda=Cuda(b"0000:02:00.0", b"0000:01:00.0")), no_smi
    )
    assert reason == ""
    assert [(gpu.index, gpu.name, gpu.compute_capability) for gpu in gpus] == [
        (0, "NVIDIA RTX A2000", "8.6"),
        (1, "NVIDIA GeForce RTX 4090", "8.9"),
    ]
    assert (gpus[1].total_bytes, gpus[1].free_bytes, gpus[1].driver) == (24 * GIB, 20 * GIB, "570.86.10")
    assert gpus[1].memory_gb_s == pytest.approx(1008, rel=1e-3)  # as NVIDIA publishes it
    assert (gpus[1].pcie_generation, gpus[1].pcie_width) == (4, 0)
    assert nvml.ended == 1


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, "no NVIDIA driver"),
        ({"libnvidia_ml": Nvml(init=9)}, "the NVIDIA kernel module is not loaded"),
        ({"libnvidia_ml": Nvml(init=18)}, "differ in version; reboot"),
        ({"libnvidia_ml": Nvml(init=999)}, "nvmlInit gave 999"),
        ({"libnvidia_ml": Nvml()}, "libcuda.so.1 was not found"),
        ({"libnvidia_ml": Nvml(), "libcuda": Cuda(init=100)}, "CUDA_VISIBLE_DEVICES may hide them"),
        ({"libnvidia_ml": Nvml(), "libcuda": Cuda(init=803)}, "cuInit gave 803"),
        ({"libnvidia_ml": Nvml(), "libcuda": Cuda()}, "sees no GPU"),
    ],
)
def test_no_gpu_has_a_reason(found: dict[str, Any], said: str) -> None:
    gpus, reason = detect_gpus(libraries(**found), no_smi)
    assert gpus == ()
    assert said in reason


def test_without_the_library_nvidia_smi_is_asked() -> None:
    def run(command: list[str]) -> str:
        assert command[0] == "nvidia-smi"
        return (
            "0, NVIDIA GeForce RTX 3090, 24576, 24000, 8.6, 4, 16, 535.129.03\n"
            "1, Tesla T4, 15360, 15000, 7.5, [N/A], [N/A], 535.129.03\n"
        )

    gpus, reason = detect_gpus(libraries(), run)
    assert reason == ""
    assert gpus[0] == Gpu(
        0, "NVIDIA GeForce RTX 3090", 24 * GIB, 24000 << 20, "8.6", 4, 16, driver="535.129.03"
    )
    assert (gpus[1].capability, gpus[1].pcie_width) == ((7, 5), 0)


def test_nvidia_smi_that_fails_or_says_something_else_is_a_reason() -> None:
    def fails(command: list[str]) -> str:
        raise subprocess.CalledProcessError(9, command)

    assert detect_gpus(libraries(), fails)[1].startswith("no NVIDIA driver")
    assert "nvidia-smi gave no list" in detect_gpus(libraries(), lambda command: "Failed to initialize")[1]


@pytest.mark.parametrize(
    ("generation", "width", "gb_s"), [(3, 16, 12.6), (4, 16, 25.2), (5, 16, 50.4), (4, 8, 12.6)]
)
def test_a_link_carries_four_fifths_of_its_lanes(generation: int, width: int, gb_s: float) -> None:
    card = Gpu(0, "", GIB, GIB, "8.9", generation, width)
    assert card.link_gb_s == pytest.approx(gb_s, rel=0.01)
    assert Gpu(0, "", GIB, GIB, "8.9", generation, width, pcie_gb_s=11.0).link_gb_s == 11.0
