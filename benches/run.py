"""`make bench`: what the engine promises, measured on this machine in under five minutes.

Runs the benches behind the rows, one JSON line per case, then prints the table. The model file is
made in a temporary folder and deleted again. The columns of other engines come from compare.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from isthmus import native
from model import model_file

HERE = Path(__file__).parent
Line = dict[str, Any]


def lines_of(script: str, *arguments: str) -> list[Line]:
    """Runs a bench, passes its JSON lines on, and returns them."""
    command = [sys.executable, str(HERE / script), *arguments]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout or ():
            print(text, end="", flush=True)
            lines.append(json.loads(text))
    if process.returncode:
        raise SystemExit(f"{script} ended with exit code {process.returncode}")
    return lines


def row(work: str, figure: str, line: Line, target: str) -> str:
    limits = []
    if "read_share" in line:
        limits.append(f"{line['read_share']:.0%} of {line['read_limit_gb_s']:.1f} GB/s")
    if "multiply_share" in line:
        limits.append(f"{line['multiply_share']:.0%} of {line['multiply_limit_tflops']:.2f} T(FL)OPS")
    setting = f"{line['isa']}, {line['threads']} threads"
    return f"| {work} | {figure} | {'; '.join(limits)} | {setting} | {target} |"


def model_rows(isas: list[str]) -> list[str]:
    with model_file(None) as path:
        decode = lines_of("decode.py", str(path), "--isa", *isas)
        prefill = lines_of("prefill.py", str(path), "--isa", *isas)
    rows = []
    for line in decode:
        target = "70 % of reading" if line["isa"].startswith("avx2") else "85 % of reading"
        rows.append(row(f"decode, {line['model']}", f"{line['tok_s']:.1f} tok/s", line, target))
    for line in prefill:
        target = {"amx": "4 x ik_llama.cpp", "avx512": "1.2 x ik_llama.cpp"}.get(line["isa"], "reported")
        work = f"prefill {line['prompt_tokens']}, {line['model']}"
        rows.append(row(work, f"{line['tok_s']:.0f} tok/s", line, target))
    return rows


def expert_rows() -> list[str]:
    rows = []
    for line in lines_of("experts.py"):
        plural = "" if line["tokens"] == 1 else "s"
        shape = f"H {line['hidden']}, F {line['ffn']}, E {line['experts']}, k {line['k']}"
        work = f"experts, {line['tokens']} token{plural}, {shape}"
        if line["tokens"] == 1:
            rows.append(row(work, f"{line['gb_s']:.1f} GB/s", line, "85 % of reading"))
        else:
            rows.append(row(work, f"{line['tflops']:.2f} TFLOPS", line, "2 x kt-kernel AMXINT4"))
    return rows


def main() -> None:
    started = time.monotonic()
    best = native.current_isa()
    others = [name for name in ("avx512", "avx2") if name in native.isa_names() and name != best]
    rows = model_rows([best, *others]) + expert_rows()
    print("\n| work | Isthmus | of the limit in the same run | with | target |\n|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"\n{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
