"""Isthmus beside other engines, alternating with each of them, as a table of ratios.

    python benches/compare.py [MODEL] [--llama-bench PATH]... [--kt PYTHON] [--rounds 3] [--isa amx avx512]
    python benches/compare.py --quant iq1_s q2_k ... --llama-bench PATH [--layers 3] ...
    python benches/compare.py [MODEL] --depth 8192 [--kv-dtype q8_0] --llama-bench PATH ...

--llama-bench: the program of llama.cpp or ik_llama.cpp, run on the same file with as many threads. --depth: a
prompt of so many tokens, and decodes behind one, with everybody's cache in --kv-dtype (bf16: the peers' in
f16, which is as many bytes); without it a prompt of 512, and the peers decode from an empty cache. --kt: a
Python interpreter that can import kt_kernel; its AMXINT4 experts have the shapes of ours, which are Q4_K (one
4-bit scale a row there, 8 scales and minima of 6 bits a block here). Without MODEL a file of real shapes is
made and deleted again. --quant: such a file in each format (or mix), one after the other, of few layers and
with a vocabulary so small that its head, in most of them Q6_K, is as small a part as a whole model's; a peer
that cannot read one has no figure there. A shared machine drifts within minutes: each round runs every engine
once, and a ratio is the median over rounds of ratios within a round; what reading gave between the runs is
said with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from common import read_limit, report, setting, timed
from experts import CASES, Case, Operator
from isthmus import native
from isthmus.weights.quants import QUANTS
from make_gguf import make_gguf
from model import DEFAULT, model_file

PROMPT_TOKENS, NEW_TOKENS = 512, 32
READ_SLICE_S = 0.3
EXPERT_ROUNDS, EXPERT_SLICE_S = 7, 0.3
QUANT_LAYERS = 3
VOCAB_PER_LAYER = 3072  # qwen3-30b-a3b: 151936 tokens, 48 layers


@dataclass
class Row:
    """One kind of work on one instruction set of ours, one figure a round for us and for each peer."""

    work: str
    isa: str
    unit: str
    ours: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)  # empty: it failed, in one round or all
    read_gb_s: list[float] = field(default_factory=list)  # what memory gave between the runs

    def ratio(self, peer: str) -> float:
        return median(a / b for a, b in zip(self.ours, self.peers[peer], strict=True))

    def ratio_to_faster(self) -> float:
        """The median of ratios to what was the fastest of the peers in that round."""
        best = [max(theirs) for theirs in zip(*filter(None, self.peers.values()), strict=True)]
        return median(a / b for a, b in zip(self.ours, best, strict=True))


def spread(values: list[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


# --- whole models, against llama-bench ---


def environment(program: Path) -> dict[str, str]:
    """With the folder of a program that was not installed, where its shared libraries lie."""
    folders = filter(None, [str(program.parent), os.environ.get("LD_LIBRARY_PATH")])
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(folders)}


@dataclass(frozen=True)
class Context:
    """How many tokens stand before a decode, in which type of cache; 0: as each engine's bench does it."""

    depth: int
    kv_dtype: str

    @property
    def prompt(self) -> int:
        return self.depth or PROMPT_TOKENS

    def runs(self, peer: str) -> list[list[object]]:
        """Arguments of each run of a peer's llama-bench."""
        if not self.depth:
            return [["-p", PROMPT_TOKENS, "-n", NEW_TOKENS]]
        kv_dtype = "f16" if self.kv_dtype == "bf16" else self.kv_dtype  # as many bytes
        kv = ["-fa", 1, "-ctk", kv_dtype, "-ctv", kv_dtype]
        prefill = ["-p", self.depth, "-n", 0, *kv]
        if peer == "ik_llama.cpp":  # repacked: a prefill is a fifth faster than from the file
            return [[*prefill, "-gp", f"{self.depth},{NEW_TOKENS}", "-rtr", 1]]
        return [prefill, ["-p", 0, "-n", NEW_TOKENS, "-d", self.depth, *kv]]


def llama_bench(program: Path, model: Path, context: Context) -> dict[str, float]:
    """Tokens per second of `program`, by the kind of work; empty if it refuses the file."""
    rates = {}
    for run in context.runs(label(program)):
        command = [program, "-m", model, "-t", native.num_threads(), "-r", 1, *run, "-o", "json"]
        done = subprocess.run(
            [*map(str, command)], stdout=subprocess.PIPE, text=True, env=environment(program)
        )
        if done.returncode:
            print(f"{program} failed on {model}, exit code {done.returncode}", file=sys.stderr)
            return {}
        for test in json.loads(done.stdout[done.stdout.index("[") :]):
            rates["decode" if test["n_gen"] else "prefill"] = test["avg_ts"]
    return rates


def isthmus_bench(model: Path, isa: str, context: Context) -> dict[str, float]:
    command = [sys.executable, "-m", "isthmus", "bench", str(model), "--json", "--isa", isa]
    command += ["-p", str(context.prompt), "-n", str(NEW_TOKENS), "--kv-dtype", context.kv_dtype]
    if context.depth:
        command += ["-r", "1"]  # after one that warms up; a long prompt takes its time
    done = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return {"decode": done["decode_tok_s"], "prefill": done["prefill_tok_s"]}


def compare_models(
    model: Path, programs: dict[str, Path], isas: list[str], rounds: int, context: Context
) -> list[Row]:
    behind = f" behind {context.depth} tokens of {context.kv_dtype}" if context.depth else ""
    names = {"prefill": f"prefill {context.prompt}", "decode": f"decode{behind}"}
    rows = {
        (isa, work): Row(f"{model.stem}, {name}", isa, "tok/s", peers={peer: [] for peer in programs})
        for isa in isas
        for work, name in names.items()
    }
    readings = [read_limit().rate(READ_SLICE_S)]

    def said(name: str, rates: dict[str, float]) -> dict[str, float]:
        """Prints them as they come: a run may be ended early."""
        readings.append(read_limit().rate(READ_SLICE_S))
        before, after = readings[-2:]
        print(f"{name}: {rates}, reading {before:.1f} GB/s before, {after:.1f} after", file=sys.stderr)
        return rates

    for _ in range(rounds):
        peers = {name: said(name, llama_bench(path, model, context)) for name, path in programs.items()}
        for isa in isas:
            for work, rate in said(f"Isthmus, {isa}", isthmus_bench(model, isa, context)).items():
                rows[isa, work].ours.append(rate)
                for name, theirs in peers.items():
                    rows[isa, work].peers[name] += filter(None, [theirs.get(work)])
    for row in rows.values():
        row.peers = {name: theirs if len(theirs) == rounds else [] for name, theirs in row.peers.items()}
        row.read_gb_s = readings
    return list(rows.values())


@contextmanager
def quant_file(quant: str, layers: int) -> Iterator[Path]:
    """A model of the default shape with `layers` layers in one format, deleted when the context ends."""
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        path = Path(folder) / f"{quant}.gguf"
        make_gguf(path, DEFAULT[0], layers, quant, vocab=VOCAB_PER_LAYER * layers)
        yield path


# --- the experts operator, against kt-kernel ---


class KtKernel:
    """kt-kernel's operator in a process of its own, which waits between the calls. A context."""

    def __init__(self, python: str, threads: int, case: Case) -> None:
        shape = (threads, case.tokens, case.hidden, case.ffn, case.experts, case.k)
        command = [python, str(Path(__file__).with_name("kt_experts.py")), *map(str, shape)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()  # ready

    def __enter__(self) -> KtKernel:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # the end of its input ends it

    def timed(self, seconds: float) -> float:
        """Seconds of one call, over about `seconds`."""
        assert self._process.stdin
        print(seconds, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        for line in self._process.stdout or ():
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
        raise RuntimeError(f"kt_experts.py ended early, exit code {self._process.wait()}")


def compare_experts(python: str, kt_threads: list[int]) -> list[Row]:
    """TFLOPS, or for one token calls a second, with the number of threads that serves kt-kernel best."""
    rows = []
    for case in CASES:
        operator = Operator("q4_k", case)
        operator()
        decode = case.tokens == 1
        tokens = f"{case.tokens} token{'' if decode else 's'}"
        shape = f"experts, {tokens}, H {case.hidden} F {case.ffn} E {case.experts} k {case.k}"
        row = Row(shape, native.current_isa(), "calls/s" if decode else "TFLOPS")
        amount = 1.0 if decode else case.flop / 1e12
        for threads in kt_threads if decode else kt_threads[-1:]:
            ours: list[float] = []
            theirs: list[float] = []
            with KtKernel(python, threads, case) as kt:
                for _ in range(EXPERT_ROUNDS):
                    theirs.append(amount / kt.timed(EXPERT_SLICE_S))
                    ours.append(amount / timed(operator, EXPERT_SLICE_S))
            if not row.ours or median(theirs) > median(row.peers["kt-kernel"]):
                row.ours, row.peers = ours, {"kt-kernel": theirs}
        rows.append(row)
    return rows


# --- what is printed ---


def table(rows: list[Row]) -> str:
    """A line a row: our figure, each peer's with the ratio to it, the ratio to the faster, and reading's."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row.peers))
    of_peers = [cell for peer in peers for cell in (peer, "ratio")]
    head = ["work", "Isthmus", *of_peers, "to the faster", "reading, GB/s"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [f"{row.work}, {row.isa}", f"{spread(row.ours)} {row.unit}"]
        for peer in peers:
            theirs = row.peers.get(peer)
            cells += [spread(theirs), f"{row.ratio(peer):.2f}"] if theirs else ["", ""]
        cells.append(f"{row.ratio_to_faster():.2f}" if any(row.peers.values()) else "")
        lines.append([*cells, spread(row.read_gb_s) if row.read_gb_s else ""])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def say(row: Row) -> None:
    for peer, theirs in row.peers.items():
        if theirs:
            ratio = round(row.ratio(peer), 3)
            figures = {"ours": median(row.ours), "theirs": median(theirs), "unit": row.unit, "ratio": ratio}
            if row.read_gb_s:
                figures["read_gb_s"] = [round(end(row.read_gb_s), 1) for end in (min, max)]
            report(bench="compare", work=row.work, peer=peer, **figures, **setting() | {"isa": row.isa})


def label(program: Path) -> str:
    """ik_llama.cpp knows a flag that llama.cpp does not. ValueError for what is no llama-bench."""
    try:
        done = subprocess.run([program, "--help"], capture_output=True, text=True, env=environment(program))
    except OSError as error:
        raise ValueError(f"{program} cannot be run: {error.strerror}") from None
    if "--n-gen" not in done.stdout:
        raise ValueError(f"{program} is no llama-bench: its --help has no --n-gen {done.stderr[-200:]}")
    return "ik_llama.cpp" if "-rtr" in done.stdout else "llama.cpp"


def peers_of(programs: list[Path]) -> dict[str, Path]:
    """By label. ValueError before anything is measured."""
    found: dict[str, Path] = {}
    for program in programs:
        path = program.resolve()
        name = label(path)
        if name in found:
            raise ValueError(f"{found[name]} and {path} are both {name}: give one of each")
        found[name] = path
    return found


def check_kt(python: str) -> None:
    """ValueError if this interpreter cannot be run or has no kt_kernel."""
    try:
        done = subprocess.run([python, "-c", "import kt_kernel"], capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"{python} cannot be run: {error.strerror}") from None
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"{python} cannot import kt_kernel: {reason or f'exit code {done.returncode}'}")


def positive(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("model", nargs="?")
    model.add_argument("--quant", nargs="+", default=[], choices=QUANTS, metavar="FORMAT")
    parser.add_argument(
        "--layers", type=positive, default=QUANT_LAYERS, help="of the files in --quant's formats"
    )
    parser.add_argument("--llama-bench", type=Path, action="append", default=[])
    parser.add_argument("--kt", metavar="PYTHON")
    parser.add_argument("--depth", type=positive, default=0)
    parser.add_argument("--kv-dtype", choices=("bf16", "q8_0"), default="bf16")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--isa", nargs="+", default=[native.current_isa()], choices=native.isa_names())
    args = parser.parse_args()
    if not args.llama_bench and not args.kt:
        parser.error("nothing to compare with: give --llama-bench PATH, --kt PYTHON or both")
    try:
        programs = peers_of(args.llama_bench)
        if args.kt:
            check_kt(args.kt)
    except ValueError as error:
        parser.error(str(error))
    rows: list[Row] = []

    def add(more: list[Row]) -> None:  # said at once: a run over many files may be ended early
        rows.extend(more)
        for row in more:
            say(row)

    if programs:
        context = Context(args.depth, args.kv_dtype)
        files = [quant_file(quant, args.layers) for quant in args.quant] or [model_file(args.model)]
        for file in files:
            with file as path:
                add(compare_models(path, programs, args.isa, args.rounds, context))
    if args.kt:
        add(compare_experts(args.kt, sorted({1, native.num_threads()})))
    print(table(rows))


if __name__ == "__main__":
    main()
