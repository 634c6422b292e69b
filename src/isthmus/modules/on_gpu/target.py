"""A torch device as modules see it: its kernels, the residual's dtype, and how its experts reach the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Literal

import torch

from isthmus.modules.split import ExpertSplit

Kernels = Literal["triton", "reference"]


def kernels_of(name: Kernels, *, fixed: bool = False) -> ModuleType:
    """isthmus.gpu.kernels, or their torch references under the same names; fixed: those of which a row's bits
    do not depend on how many there are. Chosen here and nowhere else."""
    chosen = {
        ("triton", False): "kernels",
        ("triton", True): "fixed_kernels",
        ("reference", False): "reference_kernels",
        ("reference", True): "reference_fixed",
    }
    return import_module(f"isthmus.gpu.{chosen[name, fixed]}")


@dataclass(frozen=True, eq=False)
class Target:
    """One device of a run. Compared by identity: two stand-ins on one CPU are two targets.

    kernels: a module with the names of gpu.kernels. residual: torch.bfloat16, or torch.float32 by option: of
    what passes from layer to layer and of the rows that cross to the CPU. split: the hand-off of this device;
    None where all experts are resident. exact: a row's bits are its own: one kernel for every number of rows,
    and every row a decode.
    """

    device: torch.device
    kernels: ModuleType
    residual: torch.dtype = torch.bfloat16
    split: ExpertSplit | None = None
    exact: bool = False

    @classmethod
    def of(
        cls,
        device: torch.device | str,
        *,
        kernels: Kernels | None = None,
        residual: torch.dtype = torch.bfloat16,
        split: ExpertSplit | None = None,
        exact: bool = False,
    ) -> Target:
        """kernels: None for Triton's on CUDA and the references elsewhere; on a CPU "triton" needs its
        interpreter (TRITON_INTERPRET=1 before triton is imported)."""
        device = torch.device(device)
        if residual not in (torch.bfloat16, torch.float32):
            raise ValueError(f"the residual is torch.bfloat16 or torch.float32, not {residual}")
        chosen: Kernels = kernels or ("triton" if device.type == "cuda" else "reference")
        return cls(device, kernels_of(chosen, fixed=exact), residual, split, exact)

    def stream(self) -> int:
        """The current CUstream, which a hand-off enqueues on; 0 for a device of host memory."""
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)


@dataclass(frozen=True)
class Targets:
    """Where a model's modules are.

    by_tensor: a tensor's full name -> the target of its module, None for the native CPU. slots: of layers
    whose experts are (partly) resident on their target, by expert the slot there, -1 on the CPU; a layer that
    is not named has none.
    """

    by_tensor: Callable[[str], Target | None]
    slots: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def one(cls, target: Target, slots: Mapping[int, Sequence[int]] | None = None) -> Targets:
        """Everything on one target."""
        return cls(lambda _: target, slots or {})
