"""stream: experts in host memory cross the bus into a ring on the device whenever a step needs them."""

from __future__ import annotations

from dataclasses import replace

from isthmus.placement.fill import inflated_note, place_dense
from isthmus.placement.layout import Job, Placement


def place(job: Job) -> Placement:
    placed = place_dense(job, experts=False, ring=True)
    return replace(placed, notes=inflated_note(job.parts.dense) if job.on_gpu else ())
