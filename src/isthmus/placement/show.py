"""A plan for people: one line a device, what it is expected to do, and what should be known about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isthmus.placement.layout import GIB, HOST, DevicePlan

if TYPE_CHECKING:
    from isthmus.placement.plan import Plan

COLUMNS = ("device", "holds", "weights", "experts", "cache", "working", "in all", "free")


def as_text(plan: Plan) -> str:
    rows = [COLUMNS, *(_row(plan, device) for device in plan.devices)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    return "\n".join([title(plan), "", *lines, *(["", *footer(plan)] if footer(plan) else [])])


def as_table(plan: Plan) -> Any:
    """For rich's console."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(*COLUMNS, box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for device in plan.devices:
        table.add_row(*_row(plan, device))
    return Group(Text(title(plan)), table, *(Text(line) for line in footer(plan)))


def title(plan: Plan) -> str:
    return (
        f"strategy {plan.strategy}: {plan.weight_bytes / GIB:.1f} GiB of weights, context "
        f"{plan.context_tokens:,} tokens ({plan.tokens_fit:,} fit), GiB by device:"
    )


def footer(plan: Plan) -> list[str]:
    lines = []
    found = plan.estimate
    for name, speed in (("decode", found.decode), ("prefill", found.prefill)) if found else ():
        if speed is not None:
            parts = ", ".join(f"{what} {1e3 * s:.3g}" for what, s in speed.seconds.items())
            parts += f", of these hidden {1e3 * speed.hidden_s:.3g}" if speed.hidden_s else ""
            band = f"{speed.low:.3g} to {speed.high:.3g}"
            lines.append(
                f"estimate, not measured: {speed.tok_s:.1f} tok/s {name} ({band}); ms a token: {parts}"
            )
    lines += [f"assumed: {what}" for what in found.assumed] if found is not None else []
    if found is not None and found.missing:
        lines.append(f"no estimate of all speeds: not known is {found.missing}")
    return [*lines, *(f"note: {note}" for note in plan.notes)]


def _row(plan: Plan, device: DevicePlan) -> tuple[str, ...]:
    sizes = [device.weight_bytes, device.expert_bytes, device.kv_bytes, device.scratch_bytes]
    sizes += [device.need_bytes, device.free_bytes]
    return (device.name, what_is_held(plan, device), *(f"{size / GIB:.2f}" for size in sizes))


def what_is_held(plan: Plan, device: DevicePlan) -> str:
    words = []
    begin, end = device.layers
    if end > begin:
        words.append(f"layers {begin}-{end - 1}" if end - begin > 1 else f"layer {begin}")
    words += [path for path, name in plan.modules.items() if name == device.name and "." not in path]
    if device.name == HOST:
        count = sum(name == HOST for name in plan.modules.values())  # routed experts alone stand there
        words += [f"experts of {count} layers"] if count else []
    else:
        tables = [table for table in plan.experts.values() if table.device == device.name]
        resident = sum(len(table.resident) for table in tables)
        words += [f"{resident} experts"] if resident else []
        spare = sum(table.spare for table in tables)
        words += [f"places for {spare} experts"] if spare else []
    return ", ".join(words) or "-"


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    texts = [text.ljust(width) for text, width in zip(row[:2], widths[:2], strict=True)]
    return texts + [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
