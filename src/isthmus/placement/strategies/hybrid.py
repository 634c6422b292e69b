"""hybrid: experts in host memory, multiplied there by the CPU; activations cross the bus, and nothing else.

What is left of a device after its modules and cache holds hot experts, if a profile says which these are.
Large prompts may stream experts instead, through a ring that is set aside if there is room for it.
"""

from __future__ import annotations

from dataclasses import replace

from isthmus.errors import NotEnoughMemoryError
from isthmus.placement.fill import inflated_note, place_dense
from isthmus.placement.hot import can_move, why_none_can_move, with_hot_experts, with_spare_slots
from isthmus.placement.layout import Job, Placement


def place(job: Job) -> Placement:
    notes = inflated_note(job.parts.dense) if job.on_gpu else ()
    wanted = replace(job, may_shrink=False)
    streams = job.streams and any(can_move(job, layer) for layer in job.parts.experts)
    try:
        placed = place_dense(wanted, experts=False, ring=streams)
    except NotEnoughMemoryError:
        placed = place_dense(job, experts=False, ring=False)
        if streams:
            notes += ("no room for the ring of streamed experts: the CPU computes those of long prompts too",)
    if job.profile and job.parts.experts and not any(can_move(job, layer) for layer in job.parts.experts):
        notes += (f"the profile puts no expert on the GPU: {why_none_can_move(job)}",)
    return replace(with_spare_slots(job, with_hot_experts(job, placed)), notes=notes)
