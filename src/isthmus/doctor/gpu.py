"""GPUs: whether they can be used, and how they are connected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.config import RunOptions
from isthmus.doctor.finding import GIB, Finding
from isthmus.errors import DeviceError
from isthmus.placement.devices import choose_devices
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia_link import GpuLink


def check_gpus(machine: Machine, links: Sequence[GpuLink]) -> Iterator[Finding]:
    if not machine.gpus:
        broken = any(word in machine.gpu_reason for word in ("kernel module", "differ", "does not start"))
        fix = "sudo modprobe nvidia; nvidia-smi" if broken else ""
        text = f"none: {machine.gpu_reason or 'nobody looked'}"
        yield Finding("gpu", "problem" if broken else "ok", text, fix)
        return
    for gpu in machine.gpus:
        name = f"cuda:{gpu.index}"
        yield Finding(
            "gpu",
            "ok",
            f"{name}: {gpu.name}, {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free, "
            f"compute capability {gpu.compute_capability}, driver {gpu.driver or 'not known'}",
        )
        try:
            choose_devices(machine, RunOptions(device=name))
        except DeviceError as error:
            yield Finding("gpu", "problem", str(error))
    for link in links:
        yield from _link(machine, link)
    if len(links) > 1:
        alone = [f"cuda:{link.index}" for link in links if not link.peers]
        text = (
            f"no peer access for {', '.join(alone)}: layers' rows go through RAM"
            if alone
            else "peers see each other"
        )
        yield Finding("gpu", "ok", text)


def _link(machine: Machine, link: GpuLink) -> Iterator[Finding]:
    name = f"cuda:{link.index}"
    if link.width:
        most = f"{link.max_generation} x{link.max_width} at most"
        text = f"{name}: PCIe {link.generation} x{link.width} now, {most}"
        if link.width < link.max_width:
            fix = "put the card into a slot with all lanes, without a riser"
            yield Finding("pcie", "advice", text, fix)
        else:
            idle = " (it slows down while idle)" if link.generation < link.max_generation else ""
            yield Finding("pcie", "ok", text + idle)
    total = machine.gpus[link.index].total_bytes if link.index < len(machine.gpus) else 0
    if link.bar_bytes and link.bar_bytes < total // 2:
        text = f"{name}: the CPU addresses {link.bar_bytes / GIB:.2f} of {total / GIB:.0f} GiB at once"
        yield Finding("pcie", "advice", text, "switch on Resizable BAR and Above 4G Decoding in the firmware")
    elif link.bar_bytes:
        yield Finding("pcie", "ok", f"{name}: resizable BAR is on")
