"""Filling devices: modules by blocks of layers, the cache beside them. Pure.

What the strategies that use a device have in common. A strategy says what must stand on the devices; this
finds the split and the context that fits, and refuses with the numbers if there is none.
"""

from __future__ import annotations

from dataclasses import replace

from isthmus.config import BLOCK_TOKENS
from isthmus.errors import NotEnoughMemoryError
from isthmus.placement.devices import Device
from isthmus.placement.layout import GIB, HOST, DevicePlan, ExpertTable, Job, Placement
from isthmus.placement.parts import Part
from isthmus.placement.split import split_layers

# A CUDA context with the modules of our kernels and cuBLAS's workspaces. An allowance, not a measurement.
CONTEXT_BYTES = 768 << 20
# A dequantised piece of the widest weight, for products of many rows.
WORKSPACE_BYTES = 256 << 20

# From 16 bits a weight to 2: no file of a model is smaller than another one by more.
_SMALLEST = 8


def place_dense(job: Job, *, experts: bool, ring: bool) -> Placement:
    """Every module but routed experts over the devices, by layers; with `experts` those too.

    ring: memory for streaming experts is set aside. Without `experts` they stand on the host.
    Raises NotEnoughMemoryError.
    """
    host_experts = 0 if experts else job.parts.expert_bytes
    mapped = host_experts if job.mapped_bytes else 0
    host_scratch = job.process_bytes + (job.ring_bytes if ring and job.on_gpu else 0) + job.below_bytes
    reserve = job.step_bytes + (job.ring_bytes if ring else 0) + (0 if experts else job.cache_bytes)
    if job.on_gpu:
        captured = 0 if job.strategy == "stream" else job.captured_bytes
        reserve += CONTEXT_BYTES + WORKSPACE_BYTES + job.decode_bytes + captured
    left = job.ram_bytes - host_scratch - (host_experts - mapped)
    if left < 0:
        raise _host_refusal(job, host_experts, host_scratch)
    free = [_free_bytes(device, left, len(job.devices)) for device in job.devices]
    layout = _Layout(job, [f - reserve for f in free], experts)
    num_blocks, blocks = layout.longest()
    if blocks is None:
        raise _refusal(job, layout, reserve, free)
    one_context = num_blocks
    if job.parallel > 1:
        most, _ = layout.search(one_context, (2 * job.parallel - 1) * one_context + 1)
        num_blocks += job.shared_blocks(one_context, most)
        blocks = layout.split(num_blocks) or blocks
    host = DevicePlan(HOST, (0, 0), 0, host_experts, 0, host_scratch, job.ram_bytes)
    placed = layout.placement(num_blocks, blocks, reserve, free, host)
    return replace(placed, mapped_bytes=mapped, ring=ring, shared_blocks=num_blocks - one_context)


def _free_bytes(device: Device, ram_left: int, sharing: int) -> int:
    if device.gpu is not None:
        return device.free_bytes or 0
    share = ram_left // sharing
    return share if device.free_bytes is None else min(share, device.free_bytes)


class _Layout:
    """The split for any number of blocks of cache."""

    def __init__(self, job: Job, capacities: list[int], experts: bool) -> None:
        self._job = job
        self._capacities = capacities
        self._experts = experts
        gpu = job.on_gpu
        self.weights = [0] * job.parts.layers
        self.first = self.last = 0
        for part in job.parts.dense:
            if part.layer is not None:
                self.weights[part.layer] += part.bytes_on(gpu=gpu)
            elif stands_last(part):
                self.last += part.bytes_on(gpu=gpu)
            else:
                self.first += part.bytes_on(gpu=gpu)
        on_devices = job.parts.experts if experts else {}
        self.expert_bytes = {layer: part.bytes_on(gpu=gpu) for layer, part in on_devices.items()}

    def split(self, num_blocks: int) -> list[range] | None:
        tokens = num_blocks * BLOCK_TOKENS
        kv = self._job.parts.kv_layer_bytes
        costs = [w + self.expert_bytes.get(i, 0) + tokens * kv[i] for i, w in enumerate(self.weights)]
        return split_layers(costs, self._capacities, first=self.first, last=self.last)

    def longest(self) -> tuple[int, list[range] | None]:
        """(blocks, the split) of the wanted context, or where it may shrink of the longest that fits."""
        wanted = -(-self._job.wanted_tokens // BLOCK_TOKENS)
        split = self.split(wanted)
        if split is not None or not self._job.may_shrink:
            return wanted, split
        return self.search(1, wanted)

    def search(self, fits: int, too_long: int) -> tuple[int, list[range] | None]:
        """The most blocks from `fits` up to below `too_long` for which there is a split."""
        if self.split(fits) is None:
            return fits, None
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (middle, too_long) if self.split(middle) is not None else (fits, middle)
        return fits, self.split(fits)

    def placement(
        self, num_blocks: int, blocks: list[range], reserve: int, free: list[int], host: DevicePlan
    ) -> Placement:
        job, kv = self._job, self._job.parts.kv_layer_bytes
        owner = {layer: i for i, block in enumerate(blocks) for layer in block}
        names = [device.name for device in job.devices]
        plans = []
        for i, block in enumerate(blocks):
            token = sum(kv[layer] for layer in block)
            weight = sum(self.weights[layer] for layer in block)
            weight += (self.first if i == 0 else 0) + (self.last if i == len(blocks) - 1 else 0)
            plans.append(
                DevicePlan(
                    name=names[i],
                    layers=(block.start, block.stop) if block else (0, 0),
                    weight_bytes=weight,
                    expert_bytes=sum(self.expert_bytes.get(layer, 0) for layer in block),
                    kv_bytes=num_blocks * BLOCK_TOKENS * token,
                    scratch_bytes=reserve,
                    free_bytes=free[i],
                    kv_token_bytes=token,
                )
            )
        fits = min(
            (
                (p.free_bytes - p.need_bytes + p.kv_bytes) // p.kv_token_bytes
                for p in plans
                if p.kv_token_bytes
            ),
            default=num_blocks * BLOCK_TOKENS,
        )
        modules = {part.path: names[self._device_of(part, owner)] for part in job.parts.dense}
        tables = {}
        for layer, part in job.parts.experts.items():
            device = names[owner[layer]]
            modules[part.path] = device if self._experts else HOST
            tables[layer] = ExpertTable(device, part.count, tuple(range(part.count)) if self._experts else ())
        return Placement(modules, tables, (*plans, host), num_blocks, fits)

    def _device_of(self, part: Part, owner: dict[int, int]) -> int:
        if part.layer is not None:
            return owner[part.layer]
        return len(self._job.devices) - 1 if stands_last(part) else 0


def stands_last(part: Part) -> bool:
    return part.path in ("output", "output_norm")


def inflated_note(parts: tuple[Part, ...]) -> tuple[str, ...]:
    """Says which formats of these modules become bf16 on a GPU, and what that costs."""
    chosen = [part for part in parts if part.inflated]
    if not chosen:
        return ()
    formats = ", ".join(sorted(set().union(*(part.inflated for part in chosen))))
    more = sum(part.gpu_bytes - part.ram_bytes for part in chosen)
    return (
        f"{formats} is dequantised to bf16 on the GPU ({len(chosen)} modules, {more / GIB:+.1f} GiB); its "
        "kernels multiply by Q8_0 (also for Q4_0, Q5_0 and IQ4_NL), Q4_K, Q5_K, Q6_K, MXFP4, F32, F16 and "
        "BF16",
    )


def _refusal(job: Job, layout: _Layout, reserve: int, free: list[int]) -> NotEnoughMemoryError:
    tokens = job.wanted_tokens
    weights = sum(layout.weights) + layout.first + layout.last
    experts, cache = sum(layout.expert_bytes.values()), tokens * job.parts.kv_token_bytes
    need = weights + experts + cache + reserve * len(free)
    shorter, fitting = layout.search(1, max(2, -(-tokens // BLOCK_TOKENS)))
    if fitting is not None:
        remedy = f"a shorter context: {shorter * BLOCK_TOKENS} tokens fit (--ctx)"
    elif job.cache_bytes and need - job.cache_bytes * len(free) <= sum(free):
        remedy = "a smaller --expert-cache"
    elif experts:
        remedy = "--strategy hybrid, which keeps the experts in RAM"
    elif need <= sum(free):
        remedy = "fewer devices with more memory each, or --strategy cpu: no cut between layers fits these"
    else:
        remedy = f"{(need - sum(free)) / GIB:.1f} GiB more, or --strategy cpu"
        room = weights - (need - sum(free))  # for the weights; a quantisation changes nothing else
        if room > weights / _SMALLEST:
            remedy = f"a quantisation {weights / room:.1f} times smaller, {remedy}"
    where = "GPU memory" if job.on_gpu else "memory for the split"
    names = " + ".join(device.name for device in job.devices)
    held = f"experts {experts / GIB:.1f}, " if experts else ""
    return NotEnoughMemoryError(
        f"not enough {where} for strategy {job.strategy}: {need / GIB:.1f} GiB are needed (weights "
        f"{weights / GIB:.1f}, {held}cache for {tokens} tokens {cache / GIB:.1f}, working memory "
        f"{reserve * len(free) / GIB:.1f}), {sum(free) / GIB:.1f} GiB may be used on {names}"
        f"{' in contiguous blocks of layers' if len(free) > 1 else ''}; try {remedy}",
        need_bytes=need,
        have_bytes=sum(free),
    )


def _host_refusal(job: Job, experts: int, scratch: int) -> NotEnoughMemoryError:
    need = experts + scratch
    remedies = [
        f"{(need - job.ram_bytes) / GIB:.1f} GiB more",
        f"a quantisation {need / max(1, job.ram_bytes):.1f} times smaller",
    ]
    if need - job.below_bytes <= job.ram_bytes:
        remedies = ["a smaller --kv-ram", *remedies[:1]]
    return NotEnoughMemoryError(
        f"not enough memory for strategy {job.strategy}: {need / GIB:.1f} GiB of RAM are needed (experts "
        f"{experts / GIB:.1f}, working memory {scratch / GIB:.1f}), {job.ram_bytes / GIB:.1f} GiB are "
        f"available; try {', '.join(remedies)}, or {job.to_disk} to run the experts from disk as far as "
        "memory goes",
        need_bytes=need,
        have_bytes=job.ram_bytes,
    )
