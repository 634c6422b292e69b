"""The picture of a plan: tokens per second by strategy or quantisation, and what a token's time is spent on.

matplotlib is an extra (isthmus[plot]) and imported here alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import UsageError
from isthmus.placement.cost import CPU_PRODUCTS, GPU_MEMORY, GPU_PRODUCTS, HANDOFF, LINK, RAM, Speed
from isthmus.placement.plan import Plan

if TYPE_CHECKING:
    from isthmus.placement.report import Report

_COLOURS = {
    RAM: "#4477aa", CPU_PRODUCTS: "#66ccee", GPU_MEMORY: "#228833", GPU_PRODUCTS: "#ccbb44",
    LINK: "#ee6677", HANDOFF: "#aa3377",
}  # fmt: skip


def draw(report: Report, path: Path) -> None:
    """Writes `path`, whose ending says the format. UsageError without matplotlib or a writable place."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--chart needs matplotlib: pip install 'isthmus[plot]'") from None
    plans = {name: made for name, made in report.plans.items() if isinstance(made, Plan)}
    plans |= {fit.quant.upper(): fit.plan for fit in report.compared if fit.plan is not None}
    figure = Figure(figsize=(9, 1.6 + 1.1 * max(1, len(plans))), layout="constrained")
    figure.suptitle(f"{report.model.name}: predicted, not measured")
    speeds, times = figure.subplots(1, 2)
    for row, (name, made) in enumerate(plans.items()):
        if made.estimate and made.estimate.decode:
            _bars(speeds, times, row, name, made.estimate.decode)
    speeds.set_xlabel("decode, tok/s")
    times.set_xlabel("ms a token")
    for axes in (speeds, times):
        axes.set_yticks(range(len(plans)), list(plans))
        axes.invert_yaxis()
    if times.patches:
        handles, labels = times.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        times.legend(list(unique.values()), list(unique), fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"{path}: the chart cannot be written: {error.strerror}") from None


def _bars(speeds: Any, times: Any, row: int, name: str, speed: Speed) -> None:
    band = [[speed.tok_s - speed.low], [speed.high - speed.tok_s]]
    speeds.barh(row, speed.tok_s, xerr=band, color="#bbbbbb", capsize=3)
    left = 0.0
    for what, seconds in speed.seconds.items():
        times.barh(row, 1e3 * seconds, left=left, color=_COLOURS[what], label=what)
        left += 1e3 * seconds
