"""What goes on between a device and the CPU's experts, held against the plan before weights are read."""

from __future__ import annotations

from isthmus.config import RunOptions
from isthmus.engine.devices import hands_over
from isthmus.errors import UsageError
from isthmus.placement.plan import Plan
from isthmus.placement.sizes import key
from isthmus.weights.metadata import Metadata


def check_two_sided(plan: Plan, options: RunOptions, metadata: Metadata) -> None:
    """UsageError if overlap or deferral was asked for, and the plan has no such two or the model too few."""
    wanted = [name for name in ("overlap", "defer_experts") if getattr(options, name)]
    if wanted and not hands_over(plan):
        why = f"strategy {plan.strategy} was taken" if plan.experts else "this model has no experts"
        raise UsageError(
            f"{' and '.join(wanted)}: this is between a device and the CPU's experts, but {why}; use "
            "--strategy hybrid with a model that has experts, or leave it out"
        )
    if not options.defer_experts:
        return
    top_k = metadata.int(key(metadata, "expert_used_count"), 0, min=0)
    if options.defer_experts >= top_k:
        raise UsageError(
            f"defer_experts must be 1 to {top_k - 1}, fewer than the {top_k} experts that a token of this "
            f"model takes, got {options.defer_experts}"
        )
