"""From a plan to one that this process can execute: strategies the engine has, and a torch that has CUDA.

What was asked for and cannot be had is an error; what was only chosen, since a GPU is there, falls back to
the CPU with a warning.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from isthmus.config import RunOptions
from isthmus.errors import DeviceError
from isthmus.modules.split import DeviceExperts, ExpertSplit
from isthmus.placement.machine import Machine
from isthmus.placement.plan import Plan
from isthmus.placement.plan import plan as make_plan
from isthmus.placement.profile import Profile
from isthmus.weights.source import WeightSource

log = logging.getLogger(__name__)

# Strategies that the engine executes; the others are planned, and refused here.
EXECUTABLE = ("cpu", "hybrid")


def executable_plan(
    machine: Machine, source: WeightSource, options: RunOptions, *, mapped: bool = False
) -> Plan:
    """The plan to run with. Raises what `plan` does, and DeviceError for a plan that cannot be executed."""
    profile = Profile.read(Path(options.profile)) if options.profile is not None else None
    made = make_plan(machine, source, options, mapped=mapped, profile=profile)
    reason = why_not(made)
    if reason and (options.strategy != "auto" or options.asks_for_gpu):
        raise DeviceError(reason)
    if reason:
        log.warning("running on the CPU: %s", reason)
        on_cpu = replace(options, strategy="cpu", device=None)
        made = make_plan(machine, source, on_cpu, mapped=mapped)
    for note in made.notes:
        log.warning("%s", note)
    return made


def why_not(plan: Plan) -> str:
    """Why this plan cannot be executed here; empty if it can."""
    if plan.strategy not in EXECUTABLE:
        return (
            f"strategy {plan.strategy} is planned but not executed yet; this version runs "
            f"{', '.join(EXECUTABLE)}: use --strategy cpu"
        )
    needed = [device.name for device in plan.devices if device.name.startswith("cuda")]
    if not needed:
        return ""  # hybrid on the CPU: its threads in the place of a GPU
    if torch.version.cuda is None:
        return (
            f"{', '.join(needed)} is to be used, but torch {torch.__version__} is built without CUDA; "
            "install a CUDA build of torch (see https://pytorch.org), or use --strategy cpu"
        )
    if not torch.cuda.is_available():
        return (
            f"{', '.join(needed)} is to be used, but torch {torch.__version__} finds no usable GPU: its CUDA "
            f"{torch.version.cuda} may need a newer driver; update it, or use --strategy cpu"
        )
    return (
        f"{', '.join(needed)} is to be used: this version plans for GPUs and does not execute on them yet; "
        "use --strategy cpu, or --device cpu --strategy hybrid"
    )


def split_of(plan: Plan, options: RunOptions) -> ExpertSplit | None:
    """How the plan's routed experts are handed over; None where the CPU is the device of everything."""
    if plan.strategy == "cpu" or not plan.experts:
        return None
    on_device = {
        layer: DeviceExperts(table.resident, table.spare)
        for layer, table in plan.experts.items()
        if table.resident or table.spare
    }
    return ExpertSplit("threaded", options.chunk_tokens, exact=options.exact_batching, on_device=on_device)
