"""From a plan to one that this process can execute, and to the torch devices of its parts.

What was asked for and cannot be had is an error; what was only chosen, since a GPU is there, falls back to
the CPU with a warning.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from isthmus.config import RunOptions
from isthmus.errors import DeviceError, NotEnoughMemoryError, UsageError
from isthmus.native import handoff
from isthmus.placement.fill import CONTEXT_BYTES
from isthmus.placement.layout import GIB
from isthmus.placement.machine import Machine
from isthmus.placement.plan import Plan
from isthmus.placement.plan import plan as make_plan
from isthmus.placement.profile import Profile
from isthmus.weights.source import WeightSource

log = logging.getLogger(__name__)


# A plan's device -> what it is here. For tests: `{"cuda:0": torch.device("cpu")}` puts modules of torch
# references in the place of a GPU's. Empty: a device is what its name says.
StandIns = Mapping[str, torch.device]


def executable_plan(
    machine: Machine,
    source: WeightSource,
    options: RunOptions,
    *,
    mapped: bool = False,
    stand_ins: StandIns | None = None,
) -> Plan:
    """The plan to run with.

    Raises what `plan` does, DeviceError for a plan that cannot be executed, and UsageError for an option that
    the CPU cannot keep where it is taken in a GPU's place.
    """
    profile = Profile.read(Path(options.profile)) if options.profile is not None else None
    made = make_plan(machine, source, options, mapped=mapped, profile=profile)
    reason = why_not(made, options, stand_ins or {})
    if reason and (options.strategy != "auto" or options.asks_for_gpu):
        raise DeviceError(reason)
    if reason:
        log.warning("running on the CPU: %s", reason)
        made = make_plan(machine, source, on_cpu(options), mapped=mapped)
    if options.residual_dtype == "bf16" and not gpus_of(made):
        raise UsageError(
            "residual_dtype bf16 is for a GPU, and this runs on the CPU, which keeps rows in f32"
        )
    for note in made.notes:
        log.warning("%s", note)
    return made


def on_cpu(options: RunOptions) -> RunOptions:
    """The same run without GPUs, where nobody asked for them. UsageError for options that need one."""
    alone = replace(options, strategy="auto", device=None, profile=None, expert_cache=None, stream_rows=None)
    alone = replace(alone, kv_ram=None)
    return replace(alone, strategy="cpu")


def why_not(plan: Plan, options: RunOptions, stand_ins: StandIns) -> str:
    """Why this plan cannot be executed here; empty if it can."""
    gpus = gpus_of(plan)
    if not gpus:
        return ""
    names = ", ".join(gpus)
    moving = [name for name in ("expert_cache", "stream_rows") if getattr(options, name) is not None]
    if options.exact_batching and moving:
        return (
            f"{names} is to be used, which rounds otherwise than the CPU, and with "
            f"--{moving[0].replace('_', '-')} other requests would decide which of them computes an expert: "
            "that and --exact-batching do not go together; leave one of them out"
        )
    real = [name for name in gpus if name not in stand_ins]
    if not real:
        return ""
    return _why_no_cuda(names) or _why_no_device(real) or _why_no_handoff(plan, real)


def gpus_of(plan: Plan) -> list[str]:
    """Names of the plan's GPUs, as torch has them."""
    return [device.name for device in plan.devices if device.name.startswith("cuda")]


def torch_device(name: str, stand_ins: StandIns) -> torch.device:
    return stand_ins.get(name) or torch.device(name)


def device_name(device: torch.device) -> str:
    """The card's name; `cpu` where the CPU stands in for one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def limit_memory(plan: Plan, options: RunOptions, stand_ins: StandIns) -> None:
    """Holds torch's allocator to --gpu-memory, on every GPU of the plan, and counts its use from here on."""
    for name in gpus_of(plan):
        if name in stand_ins:
            continue
        total = torch.cuda.get_device_properties(name).total_memory
        allowed = total if options.gpu_memory is None else max(0, options.gpu_memory - CONTEXT_BYTES)
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), name)
        torch.cuda.reset_peak_memory_stats(name)


def out_of_memory(plan: Plan, error: torch.OutOfMemoryError) -> NotEnoughMemoryError:
    """What is said when a device was full before all that the plan puts there stood there."""
    gpus = [device for device in plan.devices if device.name in gpus_of(plan)]
    needs = ", ".join(
        f"{gpu.name} {gpu.need_bytes / GIB:.1f} of {gpu.free_bytes / GIB:.1f} GiB" for gpu in gpus
    )
    return NotEnoughMemoryError(
        f"a GPU's memory was full while the model was loaded ({first_line(error)}); the plan takes {needs}: "
        "end what else uses the GPU, or leave room with --gpu-memory, a shorter --ctx or --strategy hybrid",
        need_bytes=max(gpu.need_bytes for gpu in gpus),
        have_bytes=min(gpu.free_bytes for gpu in gpus),
    )


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _why_no_cuda(names: str) -> str:
    if torch.version.cuda is None:
        return (
            f"{names} is to be used, but torch {torch.__version__} is built without CUDA; "
            "install a CUDA build of torch (see https://pytorch.org), or use --strategy cpu"
        )
    if not torch.cuda.is_available():
        return (
            f"{names} is to be used, but torch {torch.__version__} finds no usable GPU: its CUDA "
            f"{torch.version.cuda} may need a newer driver ({_what_cuda_says()}); update it, or use "
            "--strategy cpu"
        )
    if importlib.util.find_spec("triton") is None:
        return f"{names} is to be used, but triton is missing: pip install triton, or use --strategy cpu"
    return ""


def _what_cuda_says() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "it gives no reason"


def _why_no_device(names: list[str]) -> str:
    count = torch.cuda.device_count()
    missing = [name for name in names if int(name.partition(":")[2]) >= count]
    if not missing:
        return ""
    have = ", ".join(f"cuda:{index}" for index in range(count)) or "none"
    return f"{', '.join(missing)} is to be used, but torch sees {have}; see CUDA_VISIBLE_DEVICES"


def _why_no_handoff(plan: Plan, names: list[str]) -> str:
    """Whether each device can give work to the CPU: found out before weights are read."""
    if not hands_over(plan):
        return ""
    for name in names:
        found = handoff.probe(int(name.partition(":")[2]))
        if found.mechanism == "none":
            return f"{name} cannot hand work to the CPU: {found.reason}; use --strategy cpu or gpu"
    return ""


def hands_over(plan: Plan) -> bool:
    """Whether any routed expert is computed on the host while a device waits for it."""
    return plan.strategy == "hybrid" and bool(plan.experts)
