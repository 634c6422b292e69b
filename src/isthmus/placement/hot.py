"""Hot experts: what is left of a device holds those that a profile counts most. Pure.

The host keeps every expert: rows of a long prompt may still be computed there. An expert whose formats a GPU
does not multiply by stays on the CPU alone: dequantised it would take the room of three or four others.
"""

from __future__ import annotations

from dataclasses import replace

from isthmus.placement.layout import HOST, Job, Placement


def with_hot_experts(job: Job, placement: Placement) -> Placement:
    """Fills what is left on each device with the experts that `job.profile` counts most, by use per byte."""
    if job.profile is None:
        return placement
    tables, devices = dict(placement.experts), []
    for device in placement.devices:
        room = device.free_bytes - device.need_bytes
        ranked = sorted(
            (-count / _one(job, layer), layer, expert)
            for layer in range(*device.layers)
            if layer in tables and not (job.on_gpu and job.parts.experts[layer].inflated)
            for expert, count in enumerate(job.profile.counts.get(layer, ()))
            if count
        )
        chosen: dict[int, list[int]] = {}
        taken = 0
        for _, layer, expert in ranked if device.name != HOST else ():
            if taken + _one(job, layer) <= room:
                taken += _one(job, layer)
                chosen.setdefault(layer, []).append(expert)
        for layer, resident in chosen.items():
            tables[layer] = replace(tables[layer], resident=tuple(sorted(resident)))
        devices.append(replace(device, expert_bytes=device.expert_bytes + taken))
    return replace(placement, experts=tables, devices=tuple(devices))


def _one(job: Job, layer: int) -> int:
    part = job.parts.experts[layer]
    return part.bytes_on(gpu=job.on_gpu) // part.count
