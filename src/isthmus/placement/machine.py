"""A machine as data: what a plan is made for. Detected here, or read from JSON for a machine elsewhere.

    {"cores": 32, "total_bytes": "512GiB", "available_bytes": "500GiB", "read_gb_s": 300,
     "gpus": [{"index": 0, "name": "RTX 4090", "total_bytes": "24GiB", "free_bytes": "23.5GiB",
               "compute_capability": "8.9", "pcie_generation": 4, "pcie_width": 16, "memory_gb_s": 1008}]}

Numbers of bytes may be written as sizes. What a file leaves out is not known, never guessed. No torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from isthmus.config import ISA_NAMES, MAX_BYTES, MAX_DEVICES, check_choice, parse_bytes
from isthmus.errors import UsageError
from isthmus.placement.memory import memory_bytes, read_text
from isthmus.placement.nvidia import Gpu, detect_gpus

# The most that can be meant, by key: more is a slip of the unit.
_LIMITS: dict[str, float] = {
    "cores": 1 << 14, "threads": 1 << 15, "sockets": 64, "nodes": 256, "index": MAX_DEVICES - 1,
    "pcie_generation": 10, "pcie_width": 32, "read_gb_s": 1e5, "disk_gb_s": 1e4, "pcie_gb_s": 1e4,
    "memory_gb_s": 1e6, "bf16_tflops": 1e6, "multiply_gops": 1e7,
}  # fmt: skip
_AT_LEAST_ONE = ("cores", "total_bytes")
_MAX_TEXT = 200


@dataclass(frozen=True)
class Machine:
    """Zero and empty mean: not known. `gpu_reason`: why `gpus` is empty, where somebody looked."""

    cores: int  # physical cores that this process may use, no more than the CPU quota: native/topology
    total_bytes: int
    available_bytes: int  # that can be allocated without swapping; the page cache counts as free
    threads: int = 0  # hardware threads on those cores
    sockets: int = 0
    nodes: int = 0  # NUMA nodes
    cpu: str = ""  # the model's name
    isa: tuple[str, ...] = ()  # instruction sets of our kernels that it runs, weakest first
    avx512_bf16: bool = False  # attention's products under "avx512" are in bf16
    read_gb_s: float = 0.0  # that all cores read from memory together
    multiply_gops: float = 0.0  # int8 products from the first cache, of all cores together
    disk_gb_s: float = 0.0  # that a model is read with
    gpus: tuple[Gpu, ...] = ()
    gpu_reason: str = ""

    @classmethod
    def detect(cls, root: Path = Path("/"), cpus: set[int] | None = None) -> Machine:
        """The machine as it is now. `cpus`: the affinity mask, by default this process's own.

        Neither reading nor multiplying is measured. A drawn machine (`root`) has no GPUs.
        """
        from isthmus import native  # loads the extension
        from isthmus.native._native import read_topology, this_machine

        topology = this_machine() if cpus is None else read_topology(str(root), sorted(cpus))
        total, available = memory_bytes(root)
        gpus, reason = detect_gpus() if root == Path("/") else ((), "")
        ids = sorted(cpu.id for cpu in topology.cpus)
        base = root / "sys/devices/system/cpu"
        packages = {read_text(base / f"cpu{cpu}/topology/physical_package_id") for cpu in ids}
        return cls(
            cores=topology.default_threads,
            total_bytes=total,
            available_bytes=available,
            threads=len(ids),
            sockets=len(packages),
            nodes=len(topology.nodes),
            cpu=_cpu_info(root, "model name"),
            isa=tuple(native.isa_names()),
            avx512_bf16="avx512_bf16" in _cpu_info(root, "flags").split(),
            gpus=gpus,
            gpu_reason=reason,
        )

    @classmethod
    def from_json(cls, text: str, *, source: str = "the machine file") -> Machine:
        """Raises UsageError that names `source` and the key: unknown, missing, mistyped or absurd."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{source} is no JSON: {error}") from None
        machine: Machine = _checked(cls, data, source, "")
        for gpu in machine.gpus:
            if gpu.free_bytes > gpu.total_bytes:
                raise UsageError(f"{source}: gpus[{gpu.index}].free_bytes is more than its total_bytes")
        if [gpu.index for gpu in machine.gpus] != list(range(len(machine.gpus))):
            raise UsageError(f"{source}: gpus must have the indices 0, 1, .. in order")
        if machine.available_bytes > machine.total_bytes:
            raise UsageError(f"{source}: available_bytes is more than total_bytes")
        return machine

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def _checked(cls: type[Any], data: Any, source: str, path: str) -> Any:
    """An instance of a dataclass from decoded JSON; `path`: of the object, for messages."""
    if not isinstance(data, dict):
        raise UsageError(f"{source}: {path or 'the whole'} must be an object, got {data!r:.60}")
    known = {field.name: field for field in fields(cls)}
    values = {}
    for key, value in data.items():
        if key not in known:
            where = f"in {path}" if path else "there"
            raise UsageError(f"{source}: unknown key {key!r}; {where} may be {', '.join(known)}")
        values[key] = _value(known[key].type, key, value, source, f"{path}.{key}" if path else key)
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise UsageError(f"{source}: {path + '.' if path else ''}{name} is missing")
    return cls(**values)


def _value(kind: Any, key: str, value: Any, source: str, path: str) -> Any:
    """`kind`: the field's annotation, a string."""
    if key == "gpus" and isinstance(value, list):
        return tuple(_checked(Gpu, item, source, f"{path}[{i}]") for i, item in enumerate(value))
    if key == "isa" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        for name in value:
            check_choice(f"{source}: {path}", name, ISA_NAMES)
        return tuple(name for name in ISA_NAMES if name in value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if key.endswith("_bytes") and isinstance(value, str):
        return parse_bytes(f"{source}: {path}", value)
    if kind == "str" and isinstance(value, str) and len(value) <= _MAX_TEXT:
        if key != "compute_capability" or _is_capability(value):
            return value
    elif kind in ("int", "float") and _is_number(kind, value):
        low, high = (1 if key in _AT_LEAST_ONE else 0), _LIMITS.get(key, MAX_BYTES)
        if not low <= value <= high:
            raise UsageError(f"{source}: {path} must be from {low} to {high:.0f}, got {value!r}")
        return float(value) if kind == "float" else value
    whats = {"int": "a whole number", "float": "a number", "str": "a short text", "bool": "true or false"}
    what = "as 8.9" if key == "compute_capability" else whats.get(kind, "a list")
    raise UsageError(f"{source}: {path} must be {what}, got {value!r:.60}")


def _is_number(kind: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
        return False
    return math.isfinite(value)


def _is_capability(text: str) -> bool:
    major, dot, minor = text.partition(".")
    return bool(dot) and all(part.isascii() and part.isdigit() and len(part) <= 2 for part in (major, minor))


def _cpu_info(root: Path, key: str) -> str:
    for line in read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
