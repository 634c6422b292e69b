"""What goes on between a device and the CPU's experts, held against the plan before weights are read."""

from __future__ import annotations

from isthmus.config import RunOptions
from isthmus.engine.devices import hands_over
from isthmus.errors import UsageError
from isthmus.placement.plan import Plan


def check_two_sided(plan: Plan, options: RunOptions) -> None:
    """UsageError if overlap or deferral was asked for, and the plan has no such two."""
    wanted = [name for name in ("overlap", "defer_experts") if getattr(options, name)]
    if wanted and not hands_over(plan):
        why = f"strategy {plan.strategy} was taken" if plan.experts else "this model has no experts"
        raise UsageError(
            f"{' and '.join(wanted)}: this is between a device and the CPU's experts, but {why}; use "
            "--strategy hybrid with a model that has experts, or leave it out"
        )
