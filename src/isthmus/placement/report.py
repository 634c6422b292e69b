"""What `isthmus plan` answers, as data: a model on a machine under every strategy, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from isthmus.config import RunOptions
from isthmus.errors import DeviceError, NotEnoughMemoryError, UsageError
from isthmus.placement.describe import ModelNumbers, model_numbers
from isthmus.placement.gpus import named_gpu
from isthmus.placement.machine import Machine
from isthmus.placement.parts import ModelParts, model_parts
from isthmus.placement.plan import Plan, plan
from isthmus.placement.profile import Profile
from isthmus.placement.strategies import STRATEGIES
from isthmus.weights.headers import quantised_bytes, requantised
from isthmus.weights.quants import LADDER
from isthmus.weights.source import WeightSource

# A change is worth naming from this gain on, and at most so many are.
_WORTH_IT, _NAMED = 1.05, 5
# The card that a machine without one is imagined with, and the chunk that lets experts see more rows.
_COMMON_CARD, _LARGE_CHUNK = "rtx4090", 2048
# Options about experts that a device shares with the CPU, as they are where nothing was asked.
_OF_HYBRID = {"profile": None, "expert_cache": None, "overlap": False, "defer_experts": 0}


@dataclass(frozen=True)
class Change:
    """What would help: so many times the speed of the best strategy as it is."""

    what: str
    decode: float
    prefill: float


@dataclass(frozen=True)
class Fit:
    """A quantisation on the machine. plan None: it does not fit."""

    quant: str
    nbytes: int
    plan: Plan | None


@dataclass(frozen=True)
class Report:
    """plans: strategy -> its plan, or why there is none; instead: what fits if nothing does."""

    model: ModelNumbers
    machine: Machine
    plans: dict[str, Plan | str]
    changes: tuple[Change, ...]
    instead: Fit | None
    compared: tuple[Fit, ...]
    cannot_run: str = ""  # why, of an architecture or tensor types that can only be planned
    unused: str = ""  # what was asked of hybrid, where that cannot be had

    @property
    def best(self) -> Plan | None:
        return best(self.plans)

    def as_data(self) -> dict[str, Any]:
        """For JSON: without the path of every module."""
        return {
            "model": asdict(self.model),
            "machine": asdict(self.machine),
            "cannot_run": self.cannot_run,
            "unused": self.unused,
            "best": self.best.strategy if self.best else None,
            "strategies": {name: _plan_data(made) for name, made in self.plans.items()},
            "changes": [asdict(change) for change in self.changes],
            "instead": _fit_data(self.instead) if self.instead else None,
            "compared": [_fit_data(fit) for fit in self.compared],
        }


def make_report(
    name: str, machine: Machine, source: WeightSource, options: RunOptions, compare: Sequence[str] = ()
) -> Report:
    """Raises what `plan` does, apart from what does not fit, which is part of the answer."""
    parts = model_parts(source, options)
    plans = every_strategy(machine, source, options, parts)
    made = best(plans)
    return Report(
        model=model_numbers(name, source, parts),
        machine=machine,
        plans=plans,
        changes=tuple(what_would_help(machine, source, options, made, parts)) if made else (),
        instead=None if made else largest_that_fits(machine, source, options),
        compared=tuple(fits(machine, source, options, quant) for quant in compare),
        unused="" if isinstance(plans["hybrid"], Plan) else _unused(options),
    )


def _unused(options: RunOptions) -> str:
    names = [name for name in _OF_HYBRID if getattr(options, name)]
    shown = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    return f"{shown} is for strategy hybrid, which cannot be had here" if names else ""


def _plan_data(made: Plan | str) -> dict[str, Any]:
    if isinstance(made, str):
        return {"fits": False, "reason": made}
    data = {"fits": True, "need_ram_bytes": made.need_bytes, "devices": [asdict(d) for d in made.devices]}
    data |= {"context_tokens": made.context_tokens, "tokens_fit": made.tokens_fit, "notes": list(made.notes)}
    found = made.estimate
    for phase, speed in (("decode", found.decode), ("prefill", found.prefill)) if found else ():
        data[phase] = asdict(speed) | {"bound": speed.bound} if speed else None
    return data | {"missing": found.missing if found else "", "assumed": found.assumed if found else ()}


def _fit_data(fit: Fit) -> dict[str, Any]:
    plan = None if fit.plan is None else {"strategy": fit.plan.strategy} | _plan_data(fit.plan)
    return {"quant": fit.quant, "nbytes": fit.nbytes, "plan": plan}


def every_strategy(
    machine: Machine, source: WeightSource, options: RunOptions, parts: ModelParts | None = None
) -> dict[str, Plan | str]:
    """Strategy -> its plan, or why there is none. `options.strategy` and `device` are not heeded."""
    parts = parts or model_parts(source, options)
    profile = _profile(options)
    found: dict[str, Plan | str] = {}
    for name in STRATEGIES:
        if name != "cpu" and not machine.gpus:
            found[name] = f"needs a GPU; {machine.gpu_reason or 'the machine has none'}"
            continue
        try:
            chosen = _with_strategy(options, name)
            found[name] = plan(machine, source, chosen, profile=profile, parts=parts)
        except (NotEnoughMemoryError, DeviceError) as error:
            found[name] = str(error)
    return found


def best(plans: dict[str, Plan | str]) -> Plan | None:
    """The one that decodes fastest; without figures the last that fits."""
    fitting = [made for made in plans.values() if isinstance(made, Plan)]
    return max(reversed(fitting), key=decode_tok_s) if fitting else None


def decode_tok_s(made: Plan) -> float:
    speed = made.estimate.decode if made.estimate else None
    return speed.tok_s if speed else 0.0


def prefill_tok_s(made: Plan) -> float:
    speed = made.estimate.prefill if made.estimate else None
    return speed.tok_s if speed else 0.0


def fits(machine: Machine, source: WeightSource, options: RunOptions, quant: str) -> Fit:
    """The model in another quantisation, under its best strategy."""
    other = requantised(source, quant)
    nbytes = sum(tensor.nbytes for tensor in other.tensors.values())
    return Fit(quant, nbytes, best(_imagined(machine, other, options)))


def _imagined(
    machine: Machine, source: WeightSource, options: RunOptions, parts: ModelParts | None = None
) -> dict[str, Plan | str]:
    """`every_strategy` of a model or a machine that nobody asked for, which need not suit what was asked."""
    try:
        return every_strategy(machine, source, options, parts)
    except UsageError:  # experts in formats that no device takes, or too large for the cache asked for
        return every_strategy(machine, source, replace(options, expert_cache=None), parts)


def largest_that_fits(machine: Machine, source: WeightSource, options: RunOptions) -> Fit | None:
    """Of the common quantisations below the model's own size, the one with the most bits that fits."""
    own = sum(tensor.nbytes for tensor in source.tensors.values())
    room = machine.available_bytes + sum(gpu.free_bytes for gpu in machine.gpus)
    for quant, nbytes in quantised_bytes(source, LADDER).items():
        if nbytes < min(own, room):
            found = fits(machine, source, options, quant)
            if found.plan is not None:
                return found
    return None


def what_would_help(
    machine: Machine, source: WeightSource, options: RunOptions, made: Plan, parts: ModelParts
) -> list[Change]:
    """Changes of machine, quantisation and options by what they gain over `made`, the most first."""
    again, profile = _with_strategy(options, made.strategy), _profile(options)
    found = []

    def tried(what: str, attempt: Callable[[], Plan | None]) -> None:
        try:
            changed = attempt()
        except (NotEnoughMemoryError, DeviceError):
            return
        if changed is not None:
            decode, prefill = _ratio(changed, made, decode_tok_s), _ratio(changed, made, prefill_tok_s)
            found.append(Change(what, decode, prefill))

    def on(other: Machine, chosen: RunOptions = again) -> Plan:
        return plan(other, source, chosen, profile=profile, parts=parts)

    tried(
        "twice the RAM bandwidth (more channels filled, faster memory)",
        lambda: on(replace(machine, read_gb_s=2 * machine.read_gb_s)),
    )
    twice = replace(machine, cores=2 * machine.cores, multiply_gops=2 * machine.multiply_gops)
    tried("twice the cores", lambda: on(twice))
    if options.chunk_tokens < _LARGE_CHUNK:
        tried(
            f"--chunk {_LARGE_CHUNK}",
            lambda: on(machine, replace(again, chunk_tokens=_LARGE_CHUNK)),
        )
    if machine.gpus:
        faster = tuple(replace(gpu, pcie_gb_s=2 * gpu.link_gb_s) for gpu in machine.gpus)
        tried("a link twice as fast (PCIe generation, lanes)", lambda: on(replace(machine, gpus=faster)))
        larger = tuple(
            replace(gpu, total_bytes=2 * gpu.total_bytes, free_bytes=2 * gpu.free_bytes)
            for gpu in machine.gpus
        )
        tried(
            "twice the GPU memory",
            lambda: best(every_strategy(replace(machine, gpus=larger), source, options, parts)),
        )
    else:
        card = replace(machine, gpus=(named_gpu(_COMMON_CARD),))
        tried(f"a GPU (an {_COMMON_CARD})", lambda: best(_imagined(card, source, options, parts)))
    if (smaller := _next_smaller(source)) is not None:
        tried(f"{smaller} in place of what it is", lambda: fits(machine, source, options, smaller).plan)
    worth = [change for change in found if max(change.decode, change.prefill) >= _WORTH_IT]
    return sorted(worth, key=lambda change: -(change.decode + 0.2 * change.prefill))[:_NAMED]


def _next_smaller(source: WeightSource) -> str | None:
    """The quantisation of the ladder that is next below, by a tenth at least."""
    own = sum(tensor.nbytes for tensor in source.tensors.values())
    sizes = quantised_bytes(source, LADDER)
    return next((quant for quant, nbytes in sizes.items() if nbytes < 0.9 * own), None)


def _profile(options: RunOptions) -> Profile | None:
    return Profile.read(Path(options.profile)) if options.profile is not None else None


def _with_strategy(options: RunOptions, name: str) -> RunOptions:
    """Without what the strategy would refuse, since it does not heed it."""
    if name != "hybrid":
        options = replace(options, **_OF_HYBRID)  # type: ignore[arg-type]
    gpu_memory = None if name == "cpu" else options.gpu_memory
    kv_ram = options.kv_ram if name != "cpu" else None
    chosen = replace(options, device=None, gpu_memory=gpu_memory, kv_ram=kv_ram)
    return replace(chosen, strategy=name)  # type: ignore[arg-type]


def _ratio(changed: Plan, made: Plan, speed: Callable[[Plan], float]) -> float:
    before = speed(made)
    return speed(changed) / before if before else 1.0
