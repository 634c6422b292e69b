"""gpu: everything on the devices, each layer's experts beside the layer."""

from __future__ import annotations

from dataclasses import replace

from isthmus.placement.fill import inflated_note, place_dense
from isthmus.placement.layout import Job, Placement


def place(job: Job) -> Placement:
    placed = place_dense(job, experts=True, ring=False)
    everything = (*job.parts.dense, *job.parts.experts.values())
    return replace(placed, notes=inflated_note(everything) if job.on_gpu else ())
