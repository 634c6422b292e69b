"""`isthmus plan MODEL`: what it takes and how fast it will be, before anything is downloaded or loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli import options

if TYPE_CHECKING:
    from isthmus.weights.source import WeightSource


_RUN = ("context_tokens", "kv_dtype", "chunk_tokens", "gpu_memory", "kv_ram")
_SHARED = ("profile", "expert_cache", "overlap", "defer_experts")  # of experts on a device and the CPU


@options.with_run_options((*_RUN, *_SHARED))
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A .gguf file, demo, owner/repo[:QUANT] (headers only), or a shape such as deepseek-v3.",
        ),
    ],
    quant: Annotated[
        str | None,
        typer.Option(help="Quantisation of a shape, or that a file is imagined in, such as q4_k_m."),
    ] = None,
    machine: Annotated[
        Path | None, typer.Option(help="A machine as JSON. Default: this one.", show_default=False)
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPUs by name, such as rtx4090, 2xrtx3090 or none.", show_default=False)
    ] = None,
    ram: Annotated[str | None, typer.Option(help="Memory, such as 256GB.", show_default=False)] = None,
    ram_bandwidth: Annotated[
        str | None, typer.Option(help="What all cores read together, such as 85GB/s.", show_default=False)
    ] = None,
    pcie: Annotated[
        str | None, typer.Option(help="The GPUs' link, generation x lanes: 4x16.", show_default=False)
    ] = None,
    cores: Annotated[int | None, typer.Option(help="Physical cores.", show_default=False)] = None,
    isa: Annotated[
        str | None, typer.Option(help="The best instruction set of the CPU, such as amx.", show_default=False)
    ] = None,
    disk: Annotated[
        str | None, typer.Option(help="What the model is read with, such as 7GB/s.", show_default=False)
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Other quantisations in a table: Q8_0,Q4_K_M,IQ2_XXS.", show_default=False),
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Draw the comparison into this .png or .svg file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    *,
    run_options: dict[str, Any],
    debug: options.Debug = False,
) -> None:
    """Predict memory and speed of MODEL under every strategy, from its header and the machine's rates."""
    from contextlib import closing

    from isthmus.config import RunOptions
    from isthmus.errors import UsageError
    from isthmus.placement.described import described_machine
    from isthmus.placement.report import make_report
    from isthmus.placement.show_report import report_lines
    from isthmus.resolve import open_headers
    from isthmus.weights.quants import check_quant

    options.configure_logging(debug)
    checked = RunOptions.from_kwargs(**run_options)
    quants = [check_quant(word.strip(), what="--compare: ") for word in compare.split(",")] if compare else []
    if chart is not None and chart.suffix not in (".png", ".svg"):
        raise UsageError(f"--chart must name a .png or .svg file, got {str(chart)!r}")
    described = described_machine(
        file=machine,
        gpu=gpu,
        ram=ram,
        ram_bandwidth=ram_bandwidth,
        pcie=pcie,
        cores=cores,
        isa=isa,
        disk=disk,
    )
    with closing(open_headers(model, quant)) as source:
        report = make_report(_title(model, quant, source), described, source, checked, quants)
        report = replace(report, cannot_run=_cannot_run(report.model.architecture, source))
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(report.as_data()), indent=1).decode())
    else:
        print("\n".join(report_lines(report)))
    if chart is not None:
        from isthmus.cli.chart import draw

        draw(report, chart)


def _title(model: str, quant: str | None, source: WeightSource) -> str:
    """As it was called, with the quantisation where the name does not say it."""
    from isthmus.weights.shapes import SHAPES, usual_quant

    if model in SHAPES:
        return f"{model} {(quant or usual_quant(model)).upper()}"
    return f"{model} as {quant.upper()}" if quant and ":" not in model and "/" not in model else model


def _cannot_run(architecture: str, source: WeightSource) -> str:
    from isthmus.formats.spec import cannot_run
    from isthmus.models.table import MODELS

    if architecture not in MODELS:
        return (
            f"architecture {architecture!r} can be planned but not run yet; this version runs "
            f"{', '.join(sorted(MODELS))}"
        )
    return "; ".join(cannot_run((name, raw.format) for name, raw in source.tensors.items()))
