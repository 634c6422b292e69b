"""Links, BARs and peers, as the driver's library tells them."""

from __future__ import annotations

from typing import Any

from isthmus.placement.nvidia_link import GpuLink, gpu_links
from placement.test_nvidia import Cuda, Nvml, libraries

MIB = 1 << 20


class LinkedNvml(Nvml):
    """Two cards: the first in half a slot with a small BAR, reading the memory of the second."""

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any, generation: Any) -> int:
        generation._obj.value = 1  # idle
        return 0

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any, width: Any) -> int:
        width._obj.value = 8 * handle.value
        return 0

    def nvmlDeviceGetBAR1MemoryInfo(self, handle: Any, bar: Any) -> int:
        bar._obj.total = 256 * MIB * handle.value
        return 0

    def nvmlDeviceGetP2PStatus(self, handle: Any, other: Any, index: int, status: Any) -> int:
        assert index == 0  # reads
        status._obj.value = 0 if handle.value == 1 else 4
        return 0


def test_links_stand_in_cudas_order() -> None:
    nvml = LinkedNvml()
    found = gpu_links(libraries(libnvidia_ml=nvml, libcuda=Cuda(b"0000:01:00.0", b"0000:02:00.0")))
    # The widest link is not told (see Nvml): 0.
    assert found == (GpuLink(0, 1, 8, 4, 0, 256 * MIB, (1,)), GpuLink(1, 1, 16, 4, 0, 512 * MIB, ()))
    assert nvml.ended == 1


def test_without_a_driver_or_with_an_old_one_nothing_is_told() -> None:
    assert gpu_links(libraries()) == ()
    assert gpu_links(libraries(libnvidia_ml=Nvml(init=9))) == ()
    (old,) = gpu_links(libraries(libnvidia_ml=Nvml(), libcuda=Cuda(b"0000:01:00.0")))
    assert old == GpuLink(0, 0, 0, 4, 0, 0, ())
