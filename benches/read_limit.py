"""Holds the read loop of `isthmus bench` against an independent tool: it must read at least 0.9 of its rate.

    apt-get install sysbench      (or mbw)
    python benches/read_limit.py

A limit measured too low would flatter every share that is divided by it. sysbench reads blocks of 512 MB with
one loop a thread; mbw copies, on one thread, and every byte it copies is read and written. Both are run in
pairs with our loop, with as many threads, since a shared machine drifts; the ratio is the median. Exit code 1
below 0.9, 2 if neither tool is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from statistics import median

from isthmus import native
from isthmus.cli.measure import READ_BYTES

PAIRS = 7
LEAST_RATIO = 0.9
MIB = 1 << 20


def sysbench(threads: int) -> float:
    """GB/s of `sysbench memory`, reading from memory (blocks far beyond any cache, one for each thread)."""
    command = ["sysbench", "memory", f"--threads={threads}", "--memory-oper=read", "--memory-scope=local"]
    command += ["--memory-block-size=512M", "--memory-total-size=100T", "--time=1", "run"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"\(([\d.]+) MiB/sec\)", text)
    assert found, text
    return float(found[1]) * MIB / 1e9


def mbw(threads: int) -> float:
    """GB/s of `mbw`'s memcpy of 512 MB, counting what it reads and what it writes; one thread only."""
    assert threads == 1
    text = subprocess.run(["mbw", "-n", "2", "-t0", "512"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"AVG.*Copy: ([\d.]+) MiB/s", text)
    assert found, text
    return 2 * float(found[1]) * MIB / 1e9


def compare(name: str, tool: Callable[[int], float], threads: int) -> float:
    """The median of ours / theirs over PAIRS pairs, printed as a JSON line."""
    native.set_threads(threads)
    probe = native.ReadProbe(READ_BYTES)
    probe.run(0.1)
    ours, theirs = [], []
    for _ in range(PAIRS):
        ours.append(probe.run(0.5))
        theirs.append(tool(threads))
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    figures = {"tool": name, "threads": threads, "ours_gb_s": max(ours), "theirs_gb_s": max(theirs)}
    print(json.dumps(figures | {"ratio": round(ratio, 3)}))
    return ratio


def main() -> int:
    ratios = []
    if shutil.which("sysbench"):
        ratios += [
            compare("sysbench", sysbench, threads) for threads in (1, native.this_machine().default_threads)
        ]
    if shutil.which("mbw"):
        ratios.append(compare("mbw", mbw, 1))
    if not ratios:
        print("neither sysbench nor mbw is installed; apt-get install sysbench", file=sys.stderr)
        return 2
    return 0 if min(ratios) >= LEAST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
