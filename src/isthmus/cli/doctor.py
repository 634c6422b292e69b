"""`isthmus doctor [MODEL]`: what in this machine slows a model down, or keeps it from running."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli import options

if TYPE_CHECKING:
    from isthmus.doctor.finding import Finding, System
    from isthmus.placement.machine import Machine

# Beyond any cache, and short enough for a dozen thread counts.
_READ_BYTES, _READ_S = 512 << 20, 0.1


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="What plan takes: also its fit, pages and disk are looked at."
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Read memory and disk for some seconds.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    debug: options.Debug = False,
) -> None:
    """Look at CPU, memory, huge pages, limits, GPUs and disk. Changes nothing, needs no root.

    Exit code 1 if there is a problem; advice is none.
    """
    from isthmus.doctor.finding import System
    from isthmus.placement.machine import Machine

    options.configure_logging(debug)
    machine = Machine.detect()
    findings = list(examine(System(), machine, model, measure=measure))
    if as_json:
        import msgspec

        data = {"machine": asdict(machine), "findings": [asdict(finding) for finding in findings]}
        print(msgspec.json.format(msgspec.json.encode(data), indent=1).decode())
    else:
        print("\n".join(lines(findings)))
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


def examine(system: System, machine: Machine, model: str | None, *, measure: bool) -> Iterator[Finding]:
    """Every finding, subject by subject."""
    from isthmus.doctor.cpu import check_cpu
    from isthmus.doctor.disk import check_disk, direct_read_gb_s
    from isthmus.doctor.gpu import check_gpus
    from isthmus.doctor.memory import check_memory, measured_rates, thread_counts
    from isthmus.doctor.pages import check_pages
    from isthmus.placement.nvidia_link import gpu_links

    yield from check_cpu(system, machine)
    counts = thread_counts(max(machine.threads, machine.cores)) if measure else []
    yield from check_memory(system, machine, measured_rates(counts, _read_gb_s))
    weight_bytes, file, fit = _model(machine, model) if model is not None else (0, None, None)
    yield from check_pages(system, weight_bytes)
    yield from check_gpus(machine, gpu_links() if machine.gpus else ())
    yield from check_disk(file, direct_read_gb_s(file) if file is not None and measure else None)
    if fit is not None:
        yield fit


def lines(findings: list[Finding]) -> Iterator[str]:
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        yield f"{finding.level:7}  {finding.topic:{width}}  {finding.text}"
        if finding.fix:
            yield f"{'':7}  {'':{width}}    -> {finding.fix}"
    count = {level: sum(f.level == level for f in findings) for level in ("problem", "advice")}
    yield (
        f"{count['problem']} problem{'s' * (count['problem'] != 1)}, "
        f"{count['advice']} piece{'s' * (count['advice'] != 1)} of advice"
    )


def _read_gb_s(threads: int) -> float:
    from isthmus import native

    native.set_threads(threads)
    probe = native.ReadProbe(_READ_BYTES)
    probe.run(_READ_S / 2)  # the first touch of its pages
    return float(probe.run(_READ_S))


def _model(machine: Machine, model: str) -> tuple[int, Path | None, Finding]:
    """(bytes of its weights, its file if there is one here, whether it fits)."""
    from contextlib import closing

    from isthmus.config import RunOptions
    from isthmus.doctor.finding import Finding
    from isthmus.placement.report import best, every_strategy
    from isthmus.resolve import open_headers
    from isthmus.weights.headers import HeaderSource
    from isthmus.weights.source import is_dummy

    with closing(open_headers(model)) as source:
        nbytes = sum(tensor.nbytes for tensor in source.tensors.values())
        made = best(every_strategy(machine, source, RunOptions()))
        here = not is_dummy(source.path) and not isinstance(source, HeaderSource)
        file = source.path if here else None
    if made is None:
        text = f"{model} ({nbytes / 1e9:.1f} GB) does not fit this machine"
        return nbytes, file, Finding("model", "problem", text, f"isthmus plan {model}")
    text = f"{model} ({nbytes / 1e9:.1f} GB) fits with strategy {made.strategy}"
    return nbytes, file, Finding("model", "ok", text, f"isthmus plan {model}")
