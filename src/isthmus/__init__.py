"""Isthmus: Mixture-of-Experts models on one workstation. Experts stay in host memory, activations move."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a type checker sees of the public names
    from isthmus.engine.llm import LLM, Completion, Delta
    from isthmus.engine.request import SamplingParams
    from isthmus.errors import IsthmusError
    from isthmus.modules.heterogeneous import HeterogeneousMoELayer, MoEMetrics
    from isthmus.placement.plan import Plan

__version__ = "0.1.0"

# Public name -> its module, imported on first use: `import isthmus` costs nothing (PEP 562).
_PUBLIC = {
    "LLM": "isthmus.engine.llm",
    "HeterogeneousMoELayer": "isthmus.modules.heterogeneous",
    "MoEMetrics": "isthmus.modules.heterogeneous",
    "SamplingParams": "isthmus.engine.request",
    "Completion": "isthmus.engine.llm",
    "Delta": "isthmus.engine.llm",
    "Plan": "isthmus.placement.plan",
    "IsthmusError": "isthmus.errors",
}

__all__ = [
    "LLM",
    "Completion",
    "Delta",
    "HeterogeneousMoELayer",
    "IsthmusError",
    "MoEMetrics",
    "Plan",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'isthmus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
