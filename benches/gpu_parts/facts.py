"""What the figures are of: card, driver, link, CPU and versions, each a line."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from gpu_parts.lines import Line, Setting
from isthmus import native
from isthmus.native.handoff import probe
from isthmus.placement.memory import memory_bytes

# As nvidia-smi --help-query-gpu names them.
FIELDS = (
    "name,driver_version,vbios_version,compute_cap,memory.total,memory.used,pcie.link.gen.current,"
    "pcie.link.gen.max,pcie.link.width.current,power.limit,clocks.max.sm,clocks.max.mem,mig.mode.current,"
    "persistence_mode,ecc.mode.current"
)


def facts(setting: Setting) -> Iterator[Line]:
    yield Line("measured", value=float(not setting.quick), note="1: of a GPU; 0: tiny shapes, no figures")
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
    }
    with suppress(ImportError):
        import triton

        versions["triton"] = triton.__version__
    for name, version in versions.items():
        yield Line(name, note=str(version))
    yield Line(
        "isthmus", note=_said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    )
    yield Line("system", note=f"{platform.system()} {platform.release()}")
    machine = native.this_machine()
    nodes = f"{len(machine.nodes)} NUMA nodes" if len(machine.nodes) > 1 else "1 NUMA node"
    yield Line("CPU", note=f"{_cpu()}, {machine.default_threads} threads, {native.current_isa()}, {nodes}")
    total, available = memory_bytes(Path("/"))  # what plans are made for
    yield Line("memory", note=f"{available >> 20} of {total >> 20} MiB free")
    if not setting.on_gpu:
        yield Line("GPU", note="none: kernels run in triton's interpreter")
        return
    index = setting.device.index or 0
    free, total = torch.cuda.mem_get_info(setting.device)
    major, minor = torch.cuda.get_device_capability(setting.device)
    name = torch.cuda.get_device_name(setting.device)
    yield Line(
        "GPU", note=f"{name}, compute capability {major}.{minor}, {free >> 20} of {total >> 20} MiB free"
    )
    found = _said("nvidia-smi", f"--id={index}", f"--query-gpu={FIELDS}", "--format=csv,noheader")
    for field, value in zip(FIELDS.split(","), found.split(", "), strict=False):
        yield Line(field, note=value)
    tried = probe(index)
    version = ".".join(map(str, tried.driver_version))
    yield Line("hand-off", note=f"{tried.mechanism}: {tried.reason}; driver for CUDA {version}")


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return done.stdout.strip()
