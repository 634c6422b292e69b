"""A machine that is described on the command line: flags over this machine's data, or over a file's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from isthmus.config import ISA_NAMES, check_choice, check_int, parse_bytes
from isthmus.errors import UsageError
from isthmus.placement.gpus import parse_gpus, with_published_rate
from isthmus.placement.machine import Machine

# Of a machine's RAM, what an idle system leaves.
_FREE = 0.97
# The probe of this machine's own reading: the best of a few short ones, since others may use it too; beside
# each one of its products.
PROBE_BYTES, PROBE_S, MULTIPLY_S, _PROBES = 256 << 20, 0.06, 0.01, 4


def described_machine(
    *,
    file: Path | None = None,
    gpu: str | None = None,
    ram: str | None = None,
    ram_bandwidth: str | None = None,
    pcie: str | None = None,
    cores: int | None = None,
    isa: str | None = None,
    disk: str | None = None,
) -> Machine:
    """Flags that are None leave what the file says, or what this machine is. UsageError names the flag."""
    complete = file is None and None not in (ram, ram_bandwidth, cores, isa)
    machine = Machine(cores=1, total_bytes=1, available_bytes=1) if complete else _base(file)
    if ram is not None:
        total = parse_bytes("--ram", ram)
        machine = replace(machine, total_bytes=total, available_bytes=round(_FREE * total))
    if ram_bandwidth is not None:
        machine = replace(machine, read_gb_s=parse_rate("--ram-bandwidth", ram_bandwidth))
    if cores is not None:
        check_int("--cores", cores, 1, 1 << 14)
        machine = replace(machine, cores=cores, threads=0, sockets=0, nodes=0, cpu="", multiply_gops=0.0)
    if isa is not None:
        check_choice("--isa", isa, ISA_NAMES)
        machine = replace(machine, isa=ISA_NAMES[: ISA_NAMES.index(isa) + 1], avx512_bf16=False)
        machine = replace(machine, cpu="", multiply_gops=0.0)
    if gpu is not None:
        machine = replace(machine, gpus=parse_gpus(gpu), gpu_reason="")
    if pcie is not None:
        generation, width = _parse_pcie(pcie)
        links = {"pcie_generation": generation, "pcie_width": width, "pcie_gb_s": 0.0}
        machine = replace(machine, gpus=tuple(replace(gpu, **links) for gpu in machine.gpus))  # type: ignore[arg-type]
    if disk is not None:
        machine = replace(machine, disk_gb_s=parse_rate("--disk", disk))
    if file is None and not complete:
        machine = measured(machine, products=cores is None and isa is None)
    return replace(machine, gpus=tuple(with_published_rate(gpu) for gpu in machine.gpus))


def _base(file: Path | None) -> Machine:
    if file is None:
        return Machine.detect()
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise UsageError(f"{file}: the machine file cannot be read: {reason}") from None
    return Machine.from_json(text, source=str(file))


def measured(machine: Machine, *, products: bool = True) -> Machine:
    """This machine with what its cores read together, unless that is given, and multiply; in about 0.3 s."""
    from isthmus import native

    if machine.read_gb_s and not products:
        return machine
    probe = native.ReadProbe(PROBE_BYTES)
    probe.run(PROBE_S)  # the first touch of its pages
    rates = [(probe.run(PROBE_S), native.multiply_gops("int8", MULTIPLY_S)) for _ in range(_PROBES)]
    read, multiplied = (float(max(rate)) for rate in zip(*rates, strict=True))
    return replace(
        machine, read_gb_s=machine.read_gb_s or read, multiply_gops=multiplied if products else 0.0
    )


def parse_rate(name: str, text: str) -> float:
    """`85GB/s`, `7.5`, `120 GiB/s` -> GB/s."""
    match = re.fullmatch(
        r"(\d{1,7}(?:\.\d{1,4})?)\s*(?:([MGT])(i?)B(?:/s|ps)?)?", text.strip(), re.IGNORECASE
    )
    if match is None or not float(match[1]):
        raise UsageError(f"{name} must be a rate such as 85GB/s, got {text!r}")
    unit = (match[2] or "G").upper()
    base = 1024.0 if match[3] else 1000.0
    rate = float(match[1]) * base ** ("KMGT".index(unit) + 1) / 1e9
    if not 1e-3 <= rate <= 1e5:
        raise UsageError(f"{name} must be from 1 MB/s to 100 TB/s, got {text!r}")
    return rate


def _parse_pcie(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-6])(?:\.0)?x(1|2|4|8|16)", text.strip().lower())
    if match is None:
        raise UsageError(f"--pcie must be generation x lanes, such as 4x16 or 5x8, got {text!r}")
    return int(match[1]), int(match[2])
