"""Peak resident memory of loading a model and answering, without the pages mapped from files (design 3.4).

python benches/load.py MODEL
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from common import report
from isthmus.resolve import resolve_model
from isthmus.weights.source import open_weights

SAMPLE_S = 0.05
GIB = 1 << 30


def own_bytes(pid: int) -> int:
    """Anonymous and shared pages of a process; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE))


def main() -> None:
    path = resolve_model(sys.argv[1])
    source = open_weights(path)
    weight_bytes = sum(len(raw.data) for raw in source.tensors.values())
    source.close()
    command = [sys.executable, "-m", "isthmus", "run", str(path), "Hello there", "--raw", "--max-tokens", "8"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, own_bytes(process.pid))
        time.sleep(SAMPLE_S)
    report(
        bench="load",
        model=path.stem,
        exit_code=process.returncode,
        weights_gib=round(weight_bytes / GIB, 2),
        peak_rss_gib=round(peak / GIB, 2),
    )


if __name__ == "__main__":
    main()
