"""NVIDIA GPUs as data: from the driver's own libraries, loaded at run time, or from nvidia-smi. No torch.

libnvidia-ml knows names, memory and links without making a CUDA context. libcuda knows the order: `cuda:0` is
its first device, after CUDA_VISIBLE_DEVICES. Where neither can be loaded there may still be nvidia-smi. A
machine without a driver has no GPUs, and a reason for it that an error can quote.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Load = Callable[[str], Any]  # the name of a library -> the library, OSError without it
Run = Callable[[list[str]], str]  # a command -> its output, OSError or SubprocessError without it

# nvmlReturn_t: what can be said better than by its number.
_NVML_REASONS = {
    9: "the NVIDIA kernel module is not loaded",
    18: "the NVIDIA library and kernel module differ in version; reboot after a driver update",
}
_CUDA_NO_DEVICE = 100
_CLOCK_MEM = 2  # NVML_CLOCK_MEM
_SMI_FIELDS = (
    "index,name,memory.total,memory.free,compute_cap,pcie.link.gen.max,pcie.link.width.max,driver_version"
)


@dataclass(frozen=True)
class Gpu:
    """One GPU. Rates of 0: not known. Link: the most that card and slot can do together."""

    index: int  # as in cuda:INDEX
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: str  # "8.9"
    pcie_generation: int = 0
    pcie_width: int = 0
    pcie_gb_s: float = 0.0  # each way, as copies reach it; see link_gb_s
    memory_gb_s: float = 0.0
    bf16_tflops: float = 0.0  # of the tensor cores, dense, sums in fp32
    driver: str = ""

    @property
    def capability(self) -> tuple[int, int]:
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor or 0)

    @property
    def link_gb_s(self) -> float:
        """Of copies from pinned memory: as given, else 80 % of what the lanes carry."""
        lane = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}.get(self.pcie_generation, 0.0)
        return self.pcie_gb_s or 0.8 * lane * self.pcie_width


def detect_gpus(load: Load = ctypes.CDLL, run: Run | None = None) -> tuple[tuple[Gpu, ...], str]:
    """(GPUs in CUDA's order, ""), or ((), why there are none)."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return _from_smi(run or _run)
    code = nvml.nvmlInit_v2()
    if code:
        return (), _NVML_REASONS.get(code, f"the NVIDIA driver does not start (nvmlInit gave {code})")
    try:
        handles, reason = device_handles(nvml, load)
        return tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles)), reason
    finally:
        nvml.nvmlShutdown()


def device_handles(nvml: Any, load: Load) -> tuple[list[ctypes.c_void_p], str]:
    """A handle per device, in CUDA's order where libcuda tells it."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return [], "libcuda.so.1 was not found: the driver is installed without CUDA"
    code = cuda.cuInit(0)
    if code == _CUDA_NO_DEVICE:
        return [], "CUDA sees no device (CUDA_VISIBLE_DEVICES may hide them)"
    if code:
        return [], f"CUDA does not start (cuInit gave {code})"
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    handles = []
    for ordinal in range(count.value):
        bus_id = ctypes.create_string_buffer(32)
        handle = ctypes.c_void_p()
        if cuda.cuDeviceGetPCIBusId(bus_id, 32, ordinal) or nvml.nvmlDeviceGetHandleByPciBusId_v2(
            bus_id, ctypes.byref(handle)
        ):
            return [], f"the driver does not tell about cuda:{ordinal}"
        handles.append(handle)
    return handles, "" if handles else "the NVIDIA driver sees no GPU"


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def _gpu(nvml: Any, index: int, handle: ctypes.c_void_p) -> Gpu:
    name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(80)
    nvml.nvmlDeviceGetName(handle, name, 96)
    nvml.nvmlSystemGetDriverVersion(driver, 80)
    memory = _Memory()
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))

    def number(function: str, *arguments: int) -> int:
        call = getattr(nvml, function, None)  # older drivers lack some
        value = ctypes.c_uint()
        failed = call is None or call(handle, *arguments, ctypes.byref(value))
        return 0 if failed else value.value

    # Two transfers a clock, for GDDR as for HBM; the clock is in MHz, the bus in bits.
    transfers = 2e6 * number("nvmlDeviceGetMaxClockInfo", _CLOCK_MEM)
    return Gpu(
        index=index,
        name=name.value.decode(errors="replace"),
        total_bytes=memory.total,
        free_bytes=memory.free,
        compute_capability=f"{major.value}.{minor.value}",
        pcie_generation=number("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=number("nvmlDeviceGetMaxPcieLinkWidth"),
        memory_gb_s=transfers * number("nvmlDeviceGetMemoryBusWidth") / 8 / 1e9,
        driver=driver.value.decode(errors="replace"),
    )


def _from_smi(run: Run) -> tuple[tuple[Gpu, ...], str]:
    try:
        text = run(["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"])
    except (OSError, subprocess.SubprocessError):
        return (), "no NVIDIA driver (neither libnvidia-ml.so.1 nor nvidia-smi was found)"
    try:
        gpus = tuple(_smi_gpu(line) for line in text.splitlines() if line.strip())
    except ValueError:
        return (), f"nvidia-smi gave no list of GPUs but {' '.join(text.split())[:80]!r}"
    return gpus, "" if gpus else "nvidia-smi sees no GPU"


def _smi_gpu(line: str) -> Gpu:
    index, name, total, free, capability, generation, width, driver = (w.strip() for w in line.split(","))

    def count(word: str) -> int:
        return int(word) if word.isdigit() else 0  # "[N/A]" for what the driver does not tell

    return Gpu(
        index=int(index),
        name=name,
        total_bytes=int(total) << 20,
        free_bytes=int(free) << 20,
        compute_capability=f"{float(capability):.1f}",
        pcie_generation=count(generation),
        pcie_width=count(width),
        driver=driver,
    )


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
