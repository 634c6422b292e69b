"""Which devices a plan may use: what was asked for, held against what the machine has. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.config import RunOptions
from isthmus.errors import DeviceError
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu

# The first whose tensor cores know bf16, and the oldest our kernels are compiled for.
MIN_CAPABILITY = (8, 0)
# CUDA 12 runs on every driver of its generation, from this one on (minor version compatibility).
MIN_DRIVER = (525, 60)


@dataclass(frozen=True)
class Device:
    """Where modules may live beside the experts' host memory. gpu None: CPU threads in a GPU's place.

    free_bytes: that may be filled; None: as much RAM as the rest leaves.
    """

    name: str  # as torch has it
    gpu: Gpu | None
    free_bytes: int | None


def choose_devices(machine: Machine, options: RunOptions) -> tuple[Device, ...]:
    """The devices for the parts that are not experts; none: the CPU is the device of everything.

    Raises DeviceError if a GPU was asked for, or a strategy that needs one, and cannot be had.
    """
    asked = options.devices
    if asked and asked[0].startswith("cpu"):
        split = options.strategy in ("stream", "hybrid", "gpu")
        return tuple(Device(name, None, options.gpu_memory) for name in asked) if split else ()
    if options.strategy == "cpu":
        return ()
    try:
        return _gpus(machine, options)
    except DeviceError:
        if options.asks_for_gpu:
            raise
        return ()


def why_no_gpu(machine: Machine, options: RunOptions) -> str:
    """Why `choose_devices` took no GPU where there is one; empty if none is there or was looked for."""
    if options.strategy == "cpu" or options.devices or not machine.gpus:
        return ""
    try:
        _gpus(machine, options)
    except DeviceError as error:
        return str(error)
    return ""


def _gpus(machine: Machine, options: RunOptions) -> tuple[Device, ...]:
    if not machine.gpus:
        reason = machine.gpu_reason or "the machine has none"
        what = f"device {options.device}" if options.devices else f"strategy {options.strategy}"
        if not options.devices and options.strategy == "auto":
            what = "gpu_memory"
        raise DeviceError(
            f"{what} needs a GPU, and there is none: {reason}; use --strategy cpu, or --device cpu "
            "--strategy hybrid, which runs the split with CPU threads in the GPU's place"
        )
    if options.kv_dtype == "f32":
        raise DeviceError(
            "a GPU's attention reads a cache of bf16 or q8_0; leave --kv-dtype f32 out, or use --strategy cpu"
        )
    by_name = {f"cuda:{gpu.index}": gpu for gpu in machine.gpus}
    names = options.devices if options.devices and options.devices != ("cuda",) else tuple(by_name)
    for name in names:
        if name not in by_name:
            have = ", ".join(f"{key} ({gpu.name})" for key, gpu in by_name.items())
            raise DeviceError(f"there is no device {name}; there are {have}")
        _check(name, by_name[name])
    return tuple(Device(name, by_name[name], _free_bytes(by_name[name], options)) for name in names)


def _free_bytes(gpu: Gpu, options: RunOptions) -> int:
    return gpu.free_bytes if options.gpu_memory is None else min(gpu.free_bytes, options.gpu_memory)


def _check(name: str, gpu: Gpu) -> None:
    if gpu.capability < MIN_CAPABILITY:
        raise DeviceError(
            f"{name} ({gpu.name}) has compute capability {gpu.compute_capability}; 8.0 or newer is needed "
            "(Ampere, 2020): choose another with --device, or use --strategy cpu"
        )
    version = [int(word) for word in gpu.driver.split(".")[:2] if word.isdigit()]
    if version and tuple(version) < MIN_DRIVER:
        raise DeviceError(
            f"the NVIDIA driver is {gpu.driver}; {MIN_DRIVER[0]}.{MIN_DRIVER[1]} or newer is needed: update "
            "it, or use --strategy cpu"
        )
