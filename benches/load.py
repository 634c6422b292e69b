"""Loading: packing beside a plain copy of the same bytes, the start from a packed cache, and peak memory.

python benches/load.py MODEL        one JSON line per question; the model's file should be in the page cache
python benches/load.py --formats [NAME ...]     packing beside the copy, one line for each weight format

pack          every matrix packed and copied in turn; share = the copy's time over the packing's
start         from `import torch` to the first token, part by part: by packing, the weights in `weights_s`
              beside the plain copy; and from a packed cache (made here in a temporary folder and deleted
              again), what `weights_s` and `prefill_s` map of it beside plain reading
formats       ROUNDS times in turn, experts of one shape from a file of their own; shares are medians
memory        peak resident memory of loading and answering, without the pages mapped from files (design 3.4),
              and its share of the weights' bytes: packed 1 and what else the process takes, mapped that alone
"""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from common import LIMIT_SLICE_S, Limit, read_limit, report, setting
from isthmus.formats.spec import by_name
from isthmus.modules.loader import pack
from isthmus.native import ops
from isthmus.resolve import resolve_model
from isthmus.weights.random_blocks import BLOCKS
from isthmus.weights.source import RawTensor, WeightSource, open_weights

SAMPLE_S = 0.05
GIB = 1 << 30
PACKED_BYTES = 4 * GIB  # of the model, at most
SMALLEST_BYTES = 1 << 20
STARTS = 3
FORMAT_BYTES = 96 << 20  # of one format's file
FORMAT_SHAPE = (768, 2048)  # rows and columns of an expert: qwen3-30b-a3b's gate
ROUNDS = 9

FIRST_TOKEN = """
import json, re, sys, time
def mapped_bytes():
    return int(re.search("RssFile:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
marks = [("", time.perf_counter())]
def mark(name): marks.append((name, time.perf_counter()))
import torch
mark("import_torch_s")
from pathlib import Path
from isthmus.engine.engine import Engine
from isthmus.engine.llm import LLM
from isthmus.engine.request import SamplingParams
from isthmus.tokenizer import Tokenizer
from isthmus.weights.source import open_weights
mark("imports_s")
path = Path(sys.argv[1])
source = open_weights(path)
mark("header_s")
tokenizer = Tokenizer.from_gguf(source.metadata)
before = mapped_bytes()
mark("tokenizer_s")
engine = Engine(path, source=source)
mark("weights_s")
LLM.from_parts(engine, tokenizer).generate("Hello there, who are you?", SamplingParams(max_tokens=1))
mark("prefill_s")
parts = {name: end - start for (_, start), (name, end) in zip(marks, marks[1:])}
print(json.dumps([parts, mapped_bytes() - before]))
"""


def packing(source: WeightSource) -> dict[str, Any]:
    """Pack and copy take turns in going first; both find the pages in the page cache, not in the process."""
    pack_s = copy_s = total = 0.0
    works = [packing_seconds, lambda raw: ops.copy_seconds(raw.data)]
    for index, raw in enumerate(matrices(source)):
        ops.copy_seconds(raw.data)  # from the disk, if need be
        seconds = [0.0, 0.0]
        for which in (0, 1) if index % 2 else (1, 0):
            source.release(raw.name)
            seconds[which] = works[which](raw)
        pack_s, copy_s, total = pack_s + seconds[0], copy_s + seconds[1], total + raw.nbytes
    return {
        "gb": round(total / 1e9, 2),
        "gb_s": round(total / pack_s / 1e9, 2),
        "copy_gb_s": round(total / copy_s / 1e9, 2),
        "copy_share": round(copy_s / pack_s, 3),
    }


def matrices(source: WeightSource) -> Iterator[RawTensor]:
    total = 0
    for raw in source.tensors.values():
        if len(raw.shape) < 2 or raw.nbytes < SMALLEST_BYTES or total > PACKED_BYTES:
            continue
        if raw.format.runnable:
            total += raw.nbytes
            yield raw


def copy_rate(source: WeightSource) -> float:
    """GB/s of the plain copy alone, of pages that are new in the process."""
    seconds = total = 0.0
    for raw in matrices(source):
        source.release(raw.name)
        seconds, total = seconds + ops.copy_seconds(raw.data), total + raw.nbytes
    return total / seconds / 1e9


def packing_seconds(raw: RawTensor) -> float:
    started = time.perf_counter()
    pack(raw)
    return time.perf_counter() - started


def format_packing(name: str) -> dict[str, Any]:
    """The same of one format alone; every round packs and copies the same pages, new in the process."""
    spec, (rows, columns) = by_name(name), FORMAT_SHAPE
    count = rows * columns // spec.block_columns
    expert = BLOCKS[name](np.random.default_rng(0), count, columns**-0.5).tobytes()
    experts = FORMAT_BYTES // len(expert)
    seconds = []  # of packing and of the copy
    with tempfile.TemporaryFile(dir="/var/tmp") as file:  # on a disk, as models are
        for _ in range(experts):
            file.write(expert)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        raw = RawTensor(name, (experts, rows, columns), spec, memoryview(mapped), Path("/var/tmp"))
        ops.copy_seconds(raw.data)
        for turn in range(ROUNDS):
            took = [0.0, 0.0]
            for which in (0, 1) if turn % 2 else (1, 0):
                mapped.madvise(mmap.MADV_DONTNEED)
                took[which] = packing_seconds(raw) if which == 0 else ops.copy_seconds(raw.data)
            seconds.append(took)
    total = experts * len(expert)
    return {
        "gb_s": round(total / median(pack_s for pack_s, _ in seconds) / 1e9, 2),
        "copy_gb_s": round(total / median(copy_s for _, copy_s in seconds) / 1e9, 2),
        "copy_share": round(median(copy_s / pack_s for pack_s, copy_s in seconds), 3),
    }


def start(path: Path, environment: dict[str, str], limit: Limit, packed_bytes: int = 0) -> dict[str, Any]:
    """The parts of the fastest of some starts, in seconds; `after_torch_s` is their sum without torch.

    packed_bytes: of the weights, 0: they are mapped. Each start stands behind a slice of its limit.
    """
    runs = []
    for _ in range(STARTS):
        rate = limit.rate(LIMIT_SLICE_S)
        command = [sys.executable, "-c", FIRST_TOKEN, str(path)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        parts, mapped_bytes = json.loads(done.stdout)
        parts["after_torch_s"] = sum(parts.values()) - parts["import_torch_s"]
        runs.append((parts, mapped_bytes, rate))
    parts, mapped_bytes, rate = min(runs, key=lambda run: run[0]["after_torch_s"])
    if packed_bytes:
        gb_s = packed_bytes / parts["weights_s"] / 1e9
    else:
        gb_s = mapped_bytes / (parts["weights_s"] + parts["prefill_s"]) / 1e9
    return {name: round(seconds, 3) for name, seconds in parts.items()} | {
        "gb_s": round(gb_s, 2),
        f"{limit.name}_limit_gb_s": round(rate, 2),
        f"{limit.name}_share": round(gb_s / rate, 3),
    }


def own_bytes(pid: int) -> int:
    """Anonymous and shared pages of a process; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE))


def memory(path: Path, environment: dict[str, str], weights: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "isthmus", "run", str(path), "Hello there", "--raw", "--max-tokens", "8"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    peak = 0
    while process.poll() is None:
        peak = max(peak, own_bytes(process.pid))
        time.sleep(SAMPLE_S)
    return {
        "exit_code": process.returncode,
        "peak_rss_gib": round(peak / GIB, 2),
        "weights_share": round(peak / weights, 3),
    }


def main() -> None:
    if sys.argv[1] == "--formats":
        for name in sys.argv[2:] or BLOCKS:
            report(bench="load", case="formats", format=name, **setting(), **format_packing(name))
        return
    path = resolve_model(sys.argv[1])
    with closing(open_weights(path)) as source, tempfile.TemporaryDirectory(dir=path.parent) as folder:
        weights = sum(raw.nbytes for raw in source.tensors.values())
        facts = {"model": path.stem, "weights_gib": round(weights / GIB, 2), **setting()}
        report(bench="load", case="pack", **facts, **packing(source))
        environment = os.environ | {"ISTHMUS_CACHE": folder}
        copy = Limit("copy", "gb_s", lambda _: copy_rate(source))
        facts["weights"] = "packed"
        report(bench="load", case="start", **facts, **start(path, environment, copy, weights))
        report(bench="load", case="memory", **facts, **memory(path, environment, weights))
        pack_it = [sys.executable, "-m", "isthmus", "pack", str(path)]
        subprocess.run(pack_it, env=environment, stdout=subprocess.DEVNULL, check=True)
        facts["weights"] = "mapped"
        report(bench="load", case="start", **facts, **start(path, environment, read_limit()))
        report(bench="load", case="memory", **facts, **memory(path, environment, weights))


if __name__ == "__main__":
    main()
