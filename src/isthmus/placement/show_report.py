"""The answer of `isthmus plan` for people: the model, the machine, every strategy, and what would help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from isthmus.placement.cost import PROMPT_TOKENS, Speed
from isthmus.placement.describe import ModelNumbers
from isthmus.placement.layout import HOST, DevicePlan
from isthmus.placement.machine import Machine
from isthmus.placement.plan import Plan
from isthmus.placement.report import Change, Fit, Report
from isthmus.placement.show import what_is_held

# What a model is read with where nobody said: a SATA SSD, an NVMe one of PCIe 4.
_DISKS = {"a SATA SSD": 0.5, "an NVMe SSD": 6.0}
# Packing while loading, GB/s a core (4.6 on two, docs/performance-notes.md): beside the disk it binds on few
# cores.
PACK_GB_S = 2.3
_WIDTH = 110


def report_lines(report: Report) -> Iterator[str]:
    yield from model_lines(report.model)
    if report.cannot_run:
        yield f"note: {report.cannot_run}"
    if report.unused:
        yield f"note: {report.unused}"
    yield ""
    yield machine_line(report.machine)
    yield from strategy_lines(report.plans, report.best, report.model.context_tokens)
    if report.best is not None:
        yield load_line(report.model, report.machine)
        yield from change_lines(report.changes, report.best.strategy)
    elif report.instead is not None:
        yield "it does not fit this machine; what does is the largest of the common quantisations below:"
        yield from fit_lines([report.instead], report.model.context_tokens)
    else:
        yield "it does not fit this machine, and no common quantisation of it does"
    if report.compared:
        yield ""
        yield from fit_lines(report.compared, report.model.context_tokens)


def model_lines(model: ModelNumbers) -> Iterator[str]:
    experts = f", {model.experts_used} of {model.experts} experts in {model.expert_layers} layers"
    yield (
        f"{model.name}: {model.architecture}, {model.layers} layers{experts if model.experts else ''}; "
        f"{count(model.parameters)} parameters ({count(model.active_parameters)} active), "
        f"{model.nbytes / 1e9:.1f} GB of weights"
    )
    rows = [("", "parameters", "GB", "by format")]
    for name, component in model.components.items():
        formats = sorted(component.formats.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{form.upper()} {size / 1e9:.2f}" for form, size in formats)
        rows.append((name, count(component.parameters), f"{component.nbytes / 1e9:.2f}", shown))
    yield from table(rows, left=(0, 3))
    routed = f", {model.routed_bytes / 1e9:.2f} GB of it routed experts" if model.experts else ""
    yield f"read for one token: {model.active_bytes / 1e9:.2f} GB{routed}"
    window = 0 < model.window_tokens < model.context_tokens
    yield (
        f"cache: {model.kv_token_bytes / 1024:.1f} KiB a token; trained for a context of "
        f"{model.context_tokens:,} tokens"
        + (f"; some layers need {model.window_tokens} tokens only, which is not made use of" * window)
    )


def machine_line(machine: Machine) -> str:
    isa = f" ({machine.isa[-1]})" if machine.isa else ""
    rate = f" at {machine.read_gb_s:.0f} GB/s" if machine.read_gb_s else ", bandwidth not known"
    words = [f"{machine.cores} core{'s' * (machine.cores > 1)}{isa}"]
    words += [f"{machine.available_bytes / 1e9:.0f} of {machine.total_bytes / 1e9:.0f} GB RAM free{rate}"]
    for gpu in machine.gpus:
        words.append(
            f"{gpu.name} with {gpu.free_bytes / 1e9:.1f} GB free at {gpu.memory_gb_s:.0f} GB/s, "
            f"link {gpu.link_gb_s:.0f} GB/s"
        )
    return "machine: " + "; ".join(words if machine.gpus else [*words, "no GPU"])


def strategy_lines(plans: dict[str, Plan | str], best: Plan | None, trained: int) -> Iterator[str]:
    """A row each, then where the parts go, then why others cannot be had."""
    rows: list[tuple[str, ...]] = [
        (
            "strategy",
            "RAM GB",
            "VRAM GB",
            "context fits",
            "decode tok/s",
            "bound by",
            "prefill tok/s",
            "bound by",
        )
    ]
    for name, made in plans.items():
        if isinstance(made, Plan):
            rows.append((name + (" *" if made is best else ""), *_numbers(made, trained)))
    if len(rows) > 1:
        yield from table(rows, left=(0, 5, 7))
        yield (
            "* the best here. Predicted, not measured, in brackets a bad and a good case; one request alone, "
            f"prompt of {PROMPT_TOKENS} tokens."
        )
    for name, made in plans.items():
        if isinstance(made, Plan):
            yield f"{name}: " + "; ".join(
                _place(made, device) for device in made.devices if _any(made, device)
            )
            yield from (f"  note: {note}" for note in made.notes)
            yield from (f"  assumed: {what}" for what in (made.estimate.assumed if made.estimate else ()))
            missing = made.estimate.missing if made.estimate else ""
            yield from ([f"  not known, so not predicted: {missing}"] if missing else [])
    for reason in dict.fromkeys(made for made in plans.values() if isinstance(made, str)):
        names = ", ".join(name for name, made in plans.items() if made == reason)
        yield from textwrap.wrap(f"{names}: no, {reason}", _WIDTH, subsequent_indent="  ")


def _numbers(made: Plan, trained: int) -> tuple[str, ...]:
    vram = sum(device.need_bytes for device in made.devices if device.name.startswith("cuda"))
    decode = made.estimate.decode if made.estimate else None
    prefill = made.estimate.prefill if made.estimate else None
    return (
        f"{made.need_bytes / 1e9:.1f}",
        f"{vram / 1e9:.1f}" if vram else "-",
        f"{min(made.tokens_fit, trained):,}",
        speed(decode),
        decode.bound if decode else "-",
        speed(prefill),
        prefill.bound if prefill else "-",
    )


def speed(found: Speed | None) -> str:
    if found is None:
        return "not known"
    return f"{digits(found.tok_s)} ({digits(found.low)}-{digits(found.high)})"


def fit_lines(fits: Sequence[Fit], trained: int) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        (
            "quant",
            "GB",
            "strategy",
            "RAM GB",
            "VRAM GB",
            "context fits",
            "decode tok/s",
            "bound by",
            "prefill",
            "bound by",
        )
    ]
    for fit in fits:
        size = f"{fit.nbytes / 1e9:.1f}"
        if fit.plan is None:
            rows.append((fit.quant.upper(), size, "does not fit", *[""] * 7))
        else:
            rows.append((fit.quant.upper(), size, fit.plan.strategy, *_numbers(fit.plan, trained)))
    yield from table(rows, left=(0, 2, 7, 9))


def load_line(model: ModelNumbers, machine: Machine) -> str:
    """How long the weights take from disk; from the page cache packing binds."""
    packing = PACK_GB_S * machine.cores
    disks = {"this disk": machine.disk_gb_s} if machine.disk_gb_s else _DISKS
    times = [
        f"{duration(model.nbytes / 1e9 / min(rate, packing))} from {what} ({rate:g} GB/s)"
        for what, rate in disks.items()
    ]
    return f"load: {', '.join(times)}; seconds from a packed cache that is in the page cache"


def change_lines(changes: Sequence[Change], strategy: str) -> Iterator[str]:
    if changes:
        yield f"what would help most ({strategy}; times as fast in decode, in prefill):"
        width = max(len(change.what) for change in changes)
        yield from (f"  {c.what:{width}}  x {c.decode:.2f}  x {c.prefill:.2f}" for c in changes)


def _any(made: Plan, device: DevicePlan) -> bool:
    return device.name != HOST or what_is_held(made, device) != "-"


def _place(made: Plan, device: DevicePlan) -> str:
    return f"{device.name} {device.need_bytes / 1e9:.1f} GB: {what_is_held(made, device)}"


def table(rows: Sequence[tuple[str, ...]], *, left: tuple[int, ...]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def count(number: float) -> str:
    """671 B, 3.3 B, 120 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            value = number / size
            if unit == "T":
                return f"{number / 1e9:,.0f} B"
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{number / 1e3:.0f} K" if number >= 1e3 else str(round(number))


def digits(value: float) -> str:
    """Three digits at most."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min"
