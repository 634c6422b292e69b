"""How NVIDIA GPUs are connected: their link now and at most, what the CPU may address, peers. No torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from isthmus.placement.nvidia import Load, device_handles

_P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ


@dataclass(frozen=True)
class GpuLink:
    """Zero: not told. bar_bytes: of the card's memory, what the CPU can address at once."""

    index: int
    generation: int
    width: int
    max_generation: int
    max_width: int
    bar_bytes: int
    peers: tuple[int, ...]  # the cards whose memory it can read itself


class _Bar(ctypes.Structure):
    """nvmlBAR1Memory_t."""

    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def gpu_links(load: Load = ctypes.CDLL) -> tuple[GpuLink, ...]:
    """In CUDA's order; empty where the driver's libraries are not there or do not start."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2():
        return ()
    try:
        handles, _ = device_handles(nvml, load)
        return tuple(_link(nvml, index, handles) for index in range(len(handles)))
    finally:
        nvml.nvmlShutdown()


def _link(nvml: Any, index: int, handles: list[ctypes.c_void_p]) -> GpuLink:
    handle = handles[index]

    def number(function: str) -> int:
        call = getattr(nvml, function, None)  # older drivers lack some
        value = ctypes.c_uint()
        return 0 if call is None or call(handle, ctypes.byref(value)) else value.value

    bar = _Bar()
    bar_call = getattr(nvml, "nvmlDeviceGetBAR1MemoryInfo", None)
    known = bar_call is not None and not bar_call(handle, ctypes.byref(bar))
    return GpuLink(
        index,
        number("nvmlDeviceGetCurrPcieLinkGeneration"),
        number("nvmlDeviceGetCurrPcieLinkWidth"),
        number("nvmlDeviceGetMaxPcieLinkGeneration"),
        number("nvmlDeviceGetMaxPcieLinkWidth"),
        bar.total if known else 0,
        tuple(
            other
            for other in range(len(handles))
            if other != index and _is_peer(nvml, handle, handles[other])
        ),
    )


def _is_peer(nvml: Any, handle: ctypes.c_void_p, other: ctypes.c_void_p) -> bool:
    call = getattr(nvml, "nvmlDeviceGetP2PStatus", None)
    status = ctypes.c_int(-1)
    return call is not None and not call(handle, other, _P2P_READ, ctypes.byref(status)) and status.value == 0
