"""Hot experts: what is left of a device holds those that a profile counts most, or that decoding uses. Pure.

The host keeps every expert: rows of a long prompt may still be computed there. An expert in a format whose
tiles a GPU does not read stays on the CPU alone: dequantised it would take the room of three or four others.
"""

from __future__ import annotations

from dataclasses import replace

from isthmus.errors import UsageError
from isthmus.placement.layout import GIB, HOST, Job, Placement
from isthmus.placement.sizes import GPU_TILES


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
            if layer in tables and can_move(job, layer)
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


def with_spare_slots(job: Job, placement: Placement) -> Placement:
    """Divides the cache's bytes, which `place_dense` has set aside, evenly over each device's layers.

    Raises UsageError if they are too few for one expert of each, or no expert could come.
    """
    if not job.cache_bytes or not job.parts.experts:
        return placement
    if not any(can_move(job, layer) for layer in job.parts.experts):
        raise UsageError(f"expert_cache would hold nothing: {why_none_can_move(job)}; leave it out")
    tables, devices = dict(placement.experts), []
    for device in placement.devices:
        layers = [layer for layer in range(*device.layers) if layer in tables and can_move(job, layer)]
        round_bytes = sum(_one(job, layer) for layer in layers)
        if not layers or device.name == HOST:
            devices.append(device)
            continue
        spare = job.cache_bytes // round_bytes
        if spare == 0:
            raise UsageError(
                f"expert_cache is {job.cache_bytes / GIB:.3f} GiB, one expert of each of the {len(layers)} "
                f"layers on {device.name} takes {round_bytes / GIB:.3f} GiB: give it that, or leave it out"
            )
        taken = 0
        for layer in layers:
            slots = min(spare, tables[layer].count - len(tables[layer].resident))
            tables[layer] = replace(tables[layer], spare=slots)
            taken += slots * _one(job, layer)
        devices.append(
            replace(
                device,
                expert_bytes=device.expert_bytes + taken,
                scratch_bytes=device.scratch_bytes - job.cache_bytes,
            )
        )
    return replace(placement, experts=tables, devices=tuple(devices))


def why_none_can_move(job: Job) -> str:
    formats = sorted(set().union(*(part.formats for part in job.parts.experts.values())))
    return (
        f"a GPU's kernels read the tiles of {', '.join(GPU_TILES)}, and this model's experts are "
        f"{', '.join(formats)}, which stay on the CPU"
    )


def can_move(job: Job, layer: int) -> bool:
    """Whether its experts may come to the device by a plain copy: a GPU must read their tiles."""
    return not job.on_gpu or job.parts.experts[layer].formats.keys() <= set(GPU_TILES)


def _one(job: Job, layer: int) -> int:
    part = job.parts.experts[layer]
    return part.bytes_on(gpu=job.on_gpu) // part.count
