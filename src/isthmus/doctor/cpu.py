"""Cores, instruction sets and the kernels they run, frequency, and what a hypervisor hides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from isthmus.doctor.finding import Finding, System
from isthmus.placement.machine import Machine

_CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq"
# Share of time that a hypervisor took from this machine's CPUs, from which it matters.
_STOLEN = 0.02
# Processes that want a cpu, of those there are, from which figures suffer.
_BUSY = 0.5
# Instruction set of our kernels -> the CPU flags that it needs beyond AVX2.
_FLAGS = {"amx": {"amx_tile", "amx_bf16", "amx_int8"}, "avx512": {"avx512_vnni"}, "avx2vnni": {"avx_vnni"}}


def check_cpu(system: System, machine: Machine) -> Iterator[Finding]:
    threads = f"{machine.threads} threads" if machine.threads else "threads not known"
    smt = "SMT: one thread a core is used" if machine.threads > machine.cores else "no SMT"
    yield Finding(
        "cpu",
        "ok",
        f"{machine.cpu or 'model not known'}: {machine.cores} cores that may be used, {threads}, {smt}",
    )
    yield from _held_back(system, machine)
    yield from _instruction_sets(system, machine)
    yield from _frequency(system)
    yield from check_virtual(system, machine)


def _held_back(system: System, machine: Machine) -> Iterator[Finding]:
    """What keeps this process from cpus that are there: an affinity, a quota, other work."""
    online = _count_of(system.text("sys/devices/system/cpu/online"))
    if machine.threads and online > machine.threads:
        yield Finding(
            "cpu",
            "advice",
            f"an affinity or cpuset leaves {machine.threads} of {online} threads to this process",
            "taskset, systemd's AllowedCPUs or docker's --cpuset-cpus set it: start without",
        )
    quota = _quota(system)
    if quota and quota < machine.threads:
        yield Finding(
            "cpu",
            "advice",
            f"a cgroup grants the time of {quota:.1f} cpus: no more threads than that are used",
            "raise the container's limit (docker run --cpus, systemd CPUQuota)",
        )
    load = system.text("proc/loadavg").partition(" ")[0]
    if load.replace(".", "", 1).isdigit() and online and float(load) > _BUSY * online:
        yield Finding(
            "cpu",
            "advice",
            f"{load} processes wanted a cpu in the last minute, of {online}: figures below are lower for it",
            "end other work (top), then look again",
        )


def _count_of(cpus: str) -> int:
    """`0-3,8` -> 5; 0 for what is no list of cpus."""
    count = 0
    for words in cpus.split(","):
        first, _, last = words.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return 0
        count += int(last or first) - int(first) + 1
    return count


def _quota(system: System) -> float:
    """Cpus' worth of time that the cgroup and those above it grant; 0 for no limit."""
    granted = []
    for line in system.text("proc/self/cgroup").splitlines():
        _, controllers, path = (line + "::").split(":")[:3]
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents) if ".." not in inner.parts else ():
            if controllers == "":
                words = system.text(f"sys/fs/cgroup/{folder}/cpu.max").split()
            elif "cpu" in controllers.split(","):
                files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                words = [system.text(f"sys/fs/cgroup/cpu/{folder}/{file}") for file in files]
            else:
                break
            if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
                granted.append(int(words[0]) / int(words[1]))
    return min(granted, default=0.0)


def _instruction_sets(system: System, machine: Machine) -> Iterator[Finding]:
    best = machine.isa[-1] if machine.isa else "scalar"
    flags = system.cpu_flags()
    if best == "scalar":
        yield Finding(
            "isa",
            "problem",
            "the CPU has no AVX2: only portable kernels run, tens of times slower",
            "use a CPU with AVX2 (Intel since 2013, AMD 2015), or let a virtual machine pass it through",
        )
        return
    yield Finding("isa", "ok", f"kernels run with {best} (of {', '.join(machine.isa)})")
    wanted = system.environ.get("ISTHMUS_ISA") or best
    if wanted not in machine.isa:
        text = f"ISTHMUS_ISA says {wanted}, which cannot be had here: no model is loaded"
        yield Finding("isa", "problem", text, "unset ISTHMUS_ISA")
    elif wanted != best:
        yield Finding("isa", "advice", f"ISTHMUS_ISA says {wanted}: {best} is faster", "unset ISTHMUS_ISA")
    if _FLAGS["amx"] <= flags and best != "amx":
        yield Finding(
            "isa",
            "advice",
            "the CPU has AMX, but the kernel does not let it be used",
            "Linux 5.16 or newer is needed; in a container allow arch_prctl",
        )
    elif best in ("avx2", "avx2vnni") and "avx512f" in flags:
        yield Finding("isa", "ok", "AVX-512 without VNNI: its kernels are not used")


def _frequency(system: System) -> Iterator[Finding]:
    governor = system.text(f"{_CPUFREQ}/scaling_governor")
    driver = system.text(f"{_CPUFREQ}/scaling_driver")
    if not governor:
        yield Finding(
            "frequency", "ok", "the kernel does not set it here (the firmware or a hypervisor does)"
        )
    elif governor == "performance":
        yield Finding("frequency", "ok", f"governor performance ({driver})")
    else:
        yield Finding(
            "frequency",
            "advice",
            f"governor {governor} ({driver}): cores slow down while they wait for memory",
            "sudo cpupower frequency-set -g performance",
        )
    most, limit = system.number(f"{_CPUFREQ}/cpuinfo_max_freq"), system.number(f"{_CPUFREQ}/scaling_max_freq")
    if most and limit and limit < most:
        yield Finding(
            "frequency",
            "advice",
            f"limited to {limit / 1e6:.1f} GHz of {most / 1e6:.1f}",
            f"sudo cpupower frequency-set -u {most // 1000}MHz",
        )
    for switch, off, on in (("intel_pstate/no_turbo", "1", "0"), ("cpufreq/boost", "0", "1")):
        if system.text(f"sys/devices/system/cpu/{switch}") == off:
            fix = f"echo {on} | sudo tee /sys/devices/system/cpu/{switch}"
            yield Finding("frequency", "advice", "turbo is off", fix)


def check_virtual(system: System, machine: Machine) -> Iterator[Finding]:
    """What a virtual machine does not say: whose cores these are, and where the memory is."""
    if "hypervisor" not in system.cpu_flags():
        return
    vendor = system.text("sys/class/dmi/id/sys_vendor")
    where = f" ({vendor})" if vendor else ""
    stolen = _stolen_share(system)
    if stolen >= _STOLEN:
        yield Finding(
            "virtual machine",
            "advice",
            f"under a hypervisor{where} that took {stolen:.0%} of the busy time so far: shared cores",
            "ask for dedicated cores; figures vary with the neighbours",
        )
    else:
        yield Finding(
            "virtual machine",
            "ok",
            f"under a hypervisor{where}: cores may be others' hyperthreads, which is not seen here",
        )
    if machine.nodes == 1 and machine.threads > 64:
        yield Finding(
            "virtual machine",
            "advice",
            f"{machine.threads} threads and one NUMA node: the host's nodes are probably hidden",
            "let the hypervisor show them (vNUMA), and pin virtual CPUs to nodes",
        )


def _stolen_share(system: System) -> float:
    """Of /proc/stat: user nice system idle iowait irq softirq steal .. in ticks."""
    for line in system.text("proc/stat").splitlines():
        words = line.split()
        if words and words[0] == "cpu" and len(words) > 8 and all(w.isdigit() for w in words[1:9]):
            ticks = [int(word) for word in words[1:9]]
            busy = sum(ticks) - ticks[3] - ticks[4]
            return ticks[7] / busy if busy else 0.0
    return 0.0
