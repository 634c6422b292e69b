"""stream: experts in host memory cross the bus into a ring on the device whenever a step needs them."""

from __future__ import annotations

from dataclasses import replace

from isthmus.errors import DeviceError
from isthmus.placement.fill import inflated_note, place_dense
from isthmus.placement.hot import can_move
from isthmus.placement.layout import Job, Placement
from isthmus.placement.sizes import GPU_TILES


def place(job: Job) -> Placement:
    """Raises NotEnoughMemoryError, and DeviceError for formats whose tiles a GPU does not read."""
    for layer in job.parts.experts:
        if not can_move(job, layer):
            formats = ", ".join(sorted(job.parts.experts[layer].formats))
            raise DeviceError(
                f"strategy stream copies experts' tiles as they are, and a GPU reads those of "
                f"{', '.join(GPU_TILES)}; layer {layer}'s experts are {formats}: use --strategy hybrid"
            )
    placed = place_dense(job, experts=False, ring=True)
    return replace(placed, notes=inflated_note(job.parts.dense) if job.on_gpu else ())
