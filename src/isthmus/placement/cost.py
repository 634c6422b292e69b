"""The cost model: seconds of one decoded token, from bytes and bandwidths. An estimate, never a measurement.

A token is bound by the weights read for it. Its time is the sum over the places that are read, one after the
other, since each layer waits for its experts:

    dense parts and cache on a device   bytes / (memory bandwidth of the device * share of it that is reached)
    experts on the host                 bytes / (RAM's read bandwidth * share)
    experts streamed                    bytes / link
    hand-off                            layers with experts * HANDOFF_S

The shared expert hides behind the routed ones only in part, and little of the time is its: nothing is taken
off for it. Bandwidths are those of the machine, as measured or given; one that is not known gives no
estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.placement.layout import HOST, Job, Placement
from isthmus.placement.machine import Machine
from isthmus.placement.parts import Part

# Of the read bandwidth: what decoding reaches (docs/performance.md: 70 to 90 %).
CPU_SHARE = 0.8
# Of the GPU's: whole passes lose more in small operations than in products. Taken over from reports of other
# engines (50 to 60 %), not measured here.
GPU_SHARE = 0.55
# Of one layer's submit and wait with two small copies; from others' measurements of stream memory operations.
HANDOFF_S = 18e-6
# With CPU threads in the GPU's place: the bound that the bench of the hand-off holds.
THREADED_HANDOFF_S = 30e-6
# The depth at which a token is priced: what it reads of the cache.
DEPTH_TOKENS = 1024


@dataclass(frozen=True)
class Estimate:
    """decode_tok_s 0: not known, for what `missing` says. seconds: of one token, by their place."""

    decode_tok_s: float
    seconds: dict[str, float]
    bound: str  # the largest of them
    missing: str = ""


def estimate(machine: Machine, job: Job, placement: Placement) -> Estimate:
    """Of one request that decodes alone."""
    rates = _Rates(machine, job)
    seconds: dict[str, float] = {}
    by_path = {part.path: part for part in job.parts.dense}
    for device in placement.devices:
        held = [
            by_path[path]
            for path, name in placement.modules.items()
            if name == device.name and path in by_path
        ]
        read = sum(part.gpu_read if job.on_gpu else part.ram_read for part in held)
        read += DEPTH_TOKENS * device.kv_token_bytes
        if read:
            seconds[device.name] = rates.seconds(device.name, read)
    for layer, part in job.parts.experts.items():
        here, there = _chosen_bytes(job, part, placement.experts[layer].resident)
        device_name = placement.experts[layer].device
        if here:
            seconds[device_name] = seconds.get(device_name, 0.0) + rates.seconds(device_name, here)
        if there:
            place = f"bus to {device_name}" if job.strategy == "stream" and job.on_gpu else HOST
            seconds[place] = seconds.get(place, 0.0) + rates.seconds(place, there)
    if job.strategy in ("stream", "hybrid") and job.parts.experts:
        handoff = HANDOFF_S if job.on_gpu else THREADED_HANDOFF_S
        seconds["hand-off"] = len(job.parts.experts) * handoff
    if rates.missing:
        return Estimate(0.0, {}, "", ", ".join(dict.fromkeys(rates.missing)))
    bound = max(seconds, key=lambda name: seconds[name])
    return Estimate(1 / sum(seconds.values()), seconds, bound)


def _chosen_bytes(job: Job, part: Part, resident: tuple[int, ...]) -> tuple[float, float]:
    """Of a token's experts in one layer, the bytes read on the device and elsewhere."""
    share = len(resident) / part.count
    counts = job.profile.counts.get(part.layer or 0, ()) if job.profile else ()
    if counts and sum(counts):
        share = sum(counts[expert] for expert in resident) / sum(counts)
    here = part.gpu_read if job.on_gpu else part.ram_read
    elsewhere = part.gpu_read if job.strategy == "stream" and job.on_gpu else part.ram_read
    return share * here, (1 - share) * elsewhere


class _Rates:
    """Bandwidths by place; collects those that are not known."""

    def __init__(self, machine: Machine, job: Job) -> None:
        self._machine = machine
        self._gpus = {device.name: device.gpu for device in job.devices if device.gpu}
        self.missing: list[str] = []

    def seconds(self, place: str, nbytes: float) -> float:
        if place.startswith("bus to "):
            gb_s, what = self._gpus[place.removeprefix("bus to ")].link_gb_s, f"the link of {place[7:]}"
        elif place in self._gpus:
            gb_s, what = GPU_SHARE * self._gpus[place].memory_gb_s, f"the memory bandwidth of {place}"
        else:
            gb_s, what = CPU_SHARE * self._machine.read_gb_s, "RAM's read bandwidth"
        if gb_s <= 0:
            self.missing.append(what)
            return 0.0
        return nbytes / gb_s / 1e9
