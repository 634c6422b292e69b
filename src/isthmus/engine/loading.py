"""A plan carried out: the model's weights where the plan has them, the cache beside them, and who runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine import calibration
from isthmus.engine.device_runner import DeviceRunner, give_back_cached_memory
from isthmus.engine.devices import (
    StandIns,
    gpus_of,
    hands_over,
    limit_memory,
    on_cpu,
    out_of_memory,
    torch_device,
)
from isthmus.engine.expert_cache import ExpertCache, Places
from isthmus.engine.graphs import lane_of
from isthmus.engine.handoffs import Handoffs
from isthmus.engine.lfru import Lfru
from isthmus.engine.runner import Runner
from isthmus.engine.state import State
from isthmus.engine.two_sided import check_two_sided
from isthmus.models.base import Model, load_model
from isthmus.modules.copies import Copies, HostCopies
from isthmus.modules.loader import PackedStore
from isthmus.modules.on_gpu.copies import CopyStream
from isthmus.modules.on_gpu.target import Target, Targets
from isthmus.modules.ring import ExpertRing
from isthmus.modules.split import DeviceExperts, ExpertSplit
from isthmus.modules.streamed import NEVER, Streaming
from isthmus.native.handoff import Handoff
from isthmus.placement.captured import decode_buckets
from isthmus.placement.layout import RING_EXPERTS, RING_STAGES
from isthmus.placement.plan import Plan
from isthmus.weights.source import WeightSource

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loaded:
    plan: Plan
    model: Model
    runner: Runner | DeviceRunner
    handoffs: Handoffs
    splits: Sequence[ExpertSplit] = ()  # one for each device that has experts, or gives them to the CPU
    # of each such device whose experts come and go, with the context of its queue of work
    caches: Sequence[tuple[ExpertCache, Callable[[], AbstractContextManager[Any]]]] = ()
    devices: Mapping[str, torch.device] = field(
        default_factory=dict
    )  # of the plan's; none: the CPU, natively


def load(
    plan: Plan,
    source: WeightSource,
    options: RunOptions,
    progress: Callable[[], Callable[[int], None] | None],
    store: PackedStore | None,
    *,
    plan_for_cpu: Callable[[RunOptions], Plan],
    stand_ins: StandIns | None = None,
    graphs: bool = True,
) -> Loaded:
    """progress: begins to count bytes anew. plan_for_cpu: what to run if a GPU that nobody asked for is full.

    Raises NotEnoughMemoryError if one was asked for.
    """
    check_two_sided(plan, options)
    if not gpus_of(plan):
        return _on_cpu(plan, source, options, progress(), store)
    try:
        return _on_devices(plan, source, options, progress(), store, stand_ins or {}, graphs)
    except torch.OutOfMemoryError as error:
        refusal = out_of_memory(plan, error)
        if options.strategy != "auto" or options.asks_for_gpu:
            raise refusal from error
    give_back_cached_memory()  # outside of the handler, whose traceback holds what was loaded
    log.warning("running on the CPU: %s", refusal)
    options = on_cpu(options)
    return _on_cpu(plan_for_cpu(options), source, options, progress(), store)


def _on_cpu(
    plan: Plan,
    source: WeightSource,
    options: RunOptions,
    progress: Callable[[int], None] | None,
    store: PackedStore | None,
) -> Loaded:
    """Native modules, whatever devices the plan calls the CPU."""
    split = split_of(plan, options)
    model = load_model(source, options, progress, store, split)
    handoff = split.handoff if split else None
    state = State(model.state_spec(), plan.num_blocks, options.kv_dtype)
    runner = Runner(model, state, BLOCK_TOKENS, handoff, captures=plan.strategy != "stream")
    handoffs = Handoffs([handoff] if handoff else [])
    cache = cache_of(plan, split)
    return Loaded(
        plan,
        model,
        runner,
        handoffs,
        splits=[split] if split else [],
        caches=[(cache, nullcontext)] if cache else [],
    )


def cache_of(plan: Plan, split: ExpertSplit | None) -> ExpertCache | None:
    """Of those of a device's layers whose tables have places to spare."""
    if split is None:
        return None
    layers: dict[int, tuple[Places, Lfru]] = {}
    for layer, here in split.on_device.items():
        if here.spare:
            stay = plan.experts[layer].resident
            layers[layer] = (split.resident[layer], Lfru(range(len(stay), here.count), stay))
    return ExpertCache(layers, split.count_upload) if layers else None


def split_of(plan: Plan, options: RunOptions) -> ExpertSplit | None:
    """How the CPU computes routed experts in a GPU's place and in its own; None where it is the device of
    everything."""
    if not hands_over(plan) and not streams(plan):
        return None
    return ExpertSplit(
        "threaded",
        options.chunk_tokens,
        exact=options.exact_batching,
        on_device=experts_on(plan),
        streaming=streaming_of(plan, options, CPU),
        ring=ring_of(plan, CPU, HostCopies()),
        defer=options.defer_experts,
    )


def streams(plan: Plan) -> bool:
    return plan.strategy == "stream" and bool(plan.experts)


def experts_on(plan: Plan, device: str = "") -> dict[int, DeviceExperts]:
    """By layer on that device of the plan (empty: on any), the experts that it holds and those that may
    come."""
    return {
        layer: DeviceExperts(table.resident, table.spare)
        for layer, table in plan.experts.items()
        if (table.resident or table.spare) and device in ("", table.device)
    }


def streaming_of(plan: Plan, options: RunOptions, device: torch.device) -> Streaming | None:
    """When experts cross the bus: all at every step, those of many rows in a long prompt's, or never.

    Under exact_batching none by default, since how many rows a step has would choose who computes them.
    """
    if plan.strategy == "stream":
        return Streaming(min_rows=1, every_step=True)
    if options.exact_batching and options.stream_rows is None:
        return None
    if not plan.ring or (options.stream_rows is None and device.type == "cpu"):
        return None
    return Streaming(options.stream_rows or NEVER)  # until it has been measured


def ring_of(plan: Plan, device: torch.device, copies: Copies) -> ExpertRing | None:
    if not plan.ring or not plan.experts:
        return None
    size = min(RING_EXPERTS, max(table.count for table in plan.experts.values()))
    allocate = partial(torch.empty, dtype=torch.uint8, device=device)
    return ExpertRing(RING_STAGES, size, allocate, copies)


def _on_devices(
    plan: Plan,
    source: WeightSource,
    options: RunOptions,
    progress: Callable[[int], None] | None,
    store: PackedStore | None,
    stand_ins: StandIns,
    graphs: bool,
) -> Loaded:
    """Modules of torch devices; each device has a hand-off of its own, all share the CPU's one pool."""
    limit_memory(plan, options, stand_ins)
    targets = targets_of(plan, options, stand_ins)
    model: Any = load_model(source, options, progress, store, targets=_as_the_plan(plan, targets))
    splits = [target.split for target in targets.values() if target.split]
    if plan.strategy == "hybrid" and options.stream_rows is None:
        _calibrate(splits)
    handoffs: list[Handoff] = [split.handoff for split in splits if split.handoff]
    places = [target.device for target in model.targets]
    state = State(model.state_spec(), plan.num_blocks, options.kv_dtype, places)
    for target in targets.values():
        if target.device.type == "cuda":  # the lanes do not wait for the streams of what was copied so far
            torch.cuda.synchronize(target.device)
    lanes = {target: lane_of(target.device, graphs=graphs) for target in targets.values()}
    runner = DeviceRunner(
        model, state, lanes, BLOCK_TOKENS, plan.context_tokens, handoffs, captures=not streams(plan)
    )
    runner.warm_up(options.chunk_tokens, decode_buckets(options))
    for split in splits:
        split.forget_use()
    devices = {name: target.device for name, target in targets.items()}
    caches = {lanes[target]: cache_of(plan, target.split) for target in targets.values()}
    return Loaded(
        plan,
        model,
        runner,
        Handoffs(handoffs),
        splits=splits,
        caches=[(cache, lane.here) for lane, cache in caches.items() if cache],
        devices=devices,
    )


def _calibrate(splits: Sequence[ExpertSplit]) -> None:
    for split in splits:
        if split.streamed:
            rows = calibration.measure(split)
            split.streaming = Streaming(rows)
            log.info("in a long prompt's step experts of %d rows or more are streamed", rows)


def targets_of(plan: Plan, options: RunOptions, stand_ins: StandIns) -> dict[str, Target]:
    """By the plan's name, each of its GPUs or what stands in for it."""
    residual = options.residual_dtype or "bf16"
    targets = {}
    for name in gpus_of(plan):
        device = torch_device(name, stand_ins)
        split = None
        if hands_over(plan) or streams(plan):
            settings: dict[str, Any] = {"dtype": residual}
            copies: Copies = HostCopies()
            if device.type == "cuda":
                settings["device"] = device.index
                copies = CopyStream(device)
            split = ExpertSplit(
                "stream" if device.type == "cuda" else "threaded",
                options.chunk_tokens,
                settings,
                exact=options.exact_batching,
                alike=False,
                on_device=experts_on(plan, name),
                streaming=streaming_of(plan, options, device),
                ring=ring_of(plan, device, copies),
                copies=copies,
                defer=options.defer_experts,
            )
        dtype = torch.bfloat16 if residual == "bf16" else torch.float32
        targets[name] = Target.of(device, residual=dtype, split=split, exact=options.exact_batching)
    return targets


def _as_the_plan(plan: Plan, targets: dict[str, Target]) -> Targets:
    held = plan.experts.items() if plan.strategy == "gpu" else ()
    slots = {layer: table.slots() for layer, table in held}
    return Targets(lambda name: targets.get(plan.device_of(name)), slots)
