"""Memory: modules and channels, how fast it is read by how many threads, nodes, limits, swap."""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from isthmus.doctor.finding import GIB, Finding, System
from isthmus.placement.machine import Machine

# More threads than these gain less than this: fewer leave cores to other work.
_GAIN = 1.03
# Of what the modules can do, what a read loop reaches on a healthy machine, from below.
_SHARE = 0.6
_SWAPPED_BYTES = 1 * GIB
_MODULES = re.compile(r"^Memory Device$(.*?)(?=^Memory Device$|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Modules:
    """filled, slots: of the board. mt_s: transfers a second as configured, and as the modules could."""

    filled: int
    slots: int
    mt_s: int
    rated_mt_s: int
    kind: str

    @property
    def gb_s(self) -> float:
        """At most, if every filled slot were a channel of 8 bytes; two modules a channel halve it."""
        return self.filled * self.mt_s * 8 / 1e3


def check_memory(system: System, machine: Machine, rates: dict[int, float]) -> Iterator[Finding]:
    """rates: threads -> GB/s that they read together; empty where nobody measured."""
    used = f"{machine.available_bytes / GIB:.1f} of {machine.total_bytes / GIB:.1f} GiB can be used"
    yield Finding("memory", "ok", used)
    modules = read_modules(system)
    yield from _modules(modules)
    yield from _rates(machine, rates, modules)
    yield from _nodes(system, machine)
    yield from _limits(system, machine)


def read_modules(system: System) -> Modules | None:
    """From dmidecode, which mostly only root may run; None where it does not tell."""
    try:
        text = system.run(["dmidecode", "-t", "17"])
    except (OSError, subprocess.SubprocessError):
        return None
    devices = [_fields(block) for block in _MODULES.findall(text)]
    filled = [d for d in devices if re.match(r"\d+ [MGT]B", d.get("Size", ""))]
    if not filled:
        return None
    configured = [_mt_s(d.get("Configured Memory Speed", d.get("Speed", ""))) for d in filled]
    rated = [_mt_s(d.get("Speed", "")) for d in filled]
    return Modules(len(filled), len(devices), min(configured), min(rated), filled[0].get("Type", ""))


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _mt_s(text: str) -> int:
    match = re.match(r"(\d+) M[TH]", text)
    return int(match[1]) if match else 0


def _modules(modules: Modules | None) -> Iterator[Finding]:
    if modules is None:
        unknown = "modules and channels are not known: dmidecode is missing, or only root may run it"
        yield Finding("memory", "ok", unknown, "sudo dmidecode -t 17")
        return
    text = f"{modules.filled} of {modules.slots} slots filled, {modules.kind} at {modules.mt_s} MT/s"
    if modules.mt_s < modules.rated_mt_s:
        text += f"; the modules are rated {modules.rated_mt_s}"
        yield Finding("memory", "advice", text, "set the memory profile (XMP, EXPO) in the firmware")
    else:
        yield Finding("memory", "ok", text)
    if 2 * modules.filled <= modules.slots:
        empty = f"{modules.slots - modules.filled} slots are empty: if they are channels, each adds bandwidth"
        yield Finding("memory", "advice", empty, "fill one module a channel before two (the board's manual)")


def _rates(machine: Machine, rates: dict[int, float], modules: Modules | None) -> Iterator[Finding]:
    if not rates:
        return
    best = best_threads(rates)
    table = ", ".join(f"{threads}: {rate:.0f}" for threads, rate in sorted(rates.items()))
    most = max(rates)
    text = f"read by so many threads, GB/s: {table}; best {best}"
    if best < most and rates[best] > 1.1 * rates[most]:
        yield Finding("bandwidth", "advice", f"{text}, all {most} are slower", f"--threads {best}")
    else:
        yield Finding("bandwidth", "ok", text)
    if modules is not None and modules.gb_s and max(rates.values()) < _SHARE * modules.gb_s:
        yield Finding(
            "bandwidth",
            "advice",
            f"that is {max(rates.values()) / modules.gb_s:.0%} of {modules.gb_s:.0f} GB/s that the modules "
            "could give in as many channels",
            "check that modules are spread over channels, and that no other work reads memory",
        )


def best_threads(rates: dict[int, float]) -> int:
    """The fewest threads that read about as fast as any number of them."""
    most = max(rates.values())
    return min(threads for threads, rate in rates.items() if rate * _GAIN >= most)


def measured_rates(counts: list[int], rate: Callable[[int], float]) -> dict[int, float]:
    return {count: rate(count) for count in counts}


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4 .. and all."""
    counts = [1 << i for i in range(threads.bit_length()) if 1 << i < threads]
    return [*counts, threads]


def _nodes(system: System, machine: Machine) -> Iterator[Finding]:
    if machine.nodes <= 1:
        yield Finding("numa", "ok", "one node")
        return
    sub = machine.sockets and machine.nodes > machine.sockets
    what = f"{machine.nodes} nodes on {machine.sockets} sockets"
    if sub:
        what += f": {machine.nodes // machine.sockets} a socket (SNC or NPS)"
    yield Finding("numa", "ok", f"{what}; weights are spread over them, a measurement at the start decides")
    balancing = system.text("proc/sys/kernel/numa_balancing")
    if balancing not in ("", "0"):
        yield Finding(
            "numa",
            "advice",
            "the kernel moves pages between nodes (numa_balancing), which are placed already",
            "sudo sysctl kernel.numa_balancing=0",
        )


def _limits(system: System, machine: Machine) -> Iterator[Finding]:
    physical = _meminfo(system, "MemTotal")
    if physical and machine.total_bytes < 0.95 * physical:
        yield Finding(
            "limits",
            "advice",
            f"a cgroup allows {machine.total_bytes / GIB:.1f} of {physical / GIB:.1f} GiB",
            "raise the container's memory limit (docker run --memory, systemd MemoryMax)",
        )
    space = system.limit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        text = f"address space is limited to {space / GIB:.1f} GiB: a mapped model needs as much as it has"
        yield Finding("limits", "problem", text, "ulimit -v unlimited")
    locked = system.limit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:.0f} MiB"
    yield Finding("limits", "ok", f"locked memory {shown}, open files {system.limit(resource.RLIMIT_NOFILE)}")
    total, free = _meminfo(system, "SwapTotal"), _meminfo(system, "SwapFree")
    if total - free > _SWAPPED_BYTES:
        text = (
            f"{(total - free) / GIB:.1f} GiB are swapped out: memory is short, and decoding may wait for it"
        )
        yield Finding("swap", "advice", text, "end other programs, or: sudo sysctl vm.swappiness=10")
    else:
        used = f"{(total - free) / GIB:.1f} of {total / GIB:.1f} GiB in use" if total else "none"
        yield Finding("swap", "ok", used)


def _meminfo(system: System, name: str) -> int:
    for line in system.text("proc/meminfo").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == f"{name}:" and words[1].isdigit():
            return int(words[1]) << 10
    return 0
