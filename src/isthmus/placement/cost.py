"""The cost model: seconds of a step of any number of rows, from bytes, products and the machine's rates.

A step is a sum over layers and parts, since each waits for the one before. A part takes the longer of reading
its bytes and multiplying by them:

    on a GPU         bytes / (memory bandwidth * share)   or  2 * weights * rows / (tensor TFLOPS * share)
    in RAM           bytes / (read bandwidth * share)     or  products of the cores, see below
    over the bus     bytes / link: what `stream` decodes with, and `hybrid` prefills with where that is faster
    hand-off         a layer with experts: two copies of `rows` activations / link + a constant
    turns            of overlap and deferral: at best the longer of the device's and the CPU's lane

A decoded token is a step of one row; a prompt is steps of `chunk_tokens` rows. Of a layer's E experts, rows
that choose k each touch E * (1 - (1 - k/E)^rows): those are read, each with rows * k / touched rows.

The CPU's products of many rows: ns per 16 x 64 weights and core = unpacking + rows * product, per instruction
set, by the cores' multiply rate where the machine says it; of one row: GB/s a core at which a format is
unpacked. Experts of the device get a token's choices by the profile's counts, else evenly.

Bandwidths are the machine's, as measured or given; one that is not known gives no figure. Each constant
stands with its source, and three times: as expected, and in the bad and the good case, which give the error
band. docs/planning.md holds the whole against measurements. An estimate, never a measurement. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.placement.hot import can_move
from isthmus.placement.layout import ExpertTable, Job, Placement
from isthmus.placement.machine import Machine
from isthmus.placement.parts import Part

# What limits a part of a step; the keys of Speed.seconds.
RAM, CPU_PRODUCTS, GPU_MEMORY, GPU_PRODUCTS = "RAM bandwidth", "CPU compute", "GPU memory", "GPU compute"
LINK, HANDOFF = "PCIe", "hand-off"

# The depth at which a decoded token is priced (what it reads of the cache), and the prompt of the prefill.
DEPTH_TOKENS = 1024
PROMPT_TOKENS = 2048


@dataclass(frozen=True)
class Shares:
    """Of the machine's rates, what a step reaches."""

    ram: float
    cpu_products: float
    gpu_memory: float
    gpu_products: float
    link: float
    handoff_s: float
    threaded_handoff_s: float


# ram: decoding reaches 74 to 95 % (docs/performance.md, docs/planning.md); on many cores nothing is measured
# yet, others report as little as 25 to 60. cpu_products: of what the driver alone does; see Core.whole. AMX's
# whole prefills reach 0.64 to 1.0 of the driver beside a neighbour, less on a busy machine. gpu_memory,
# gpu_products: from reports of other engines (whole passes lose more in small operations than in products),
# not measured here. link: of `link_gb_s`, which is what pinned copies reach. handoff_s: others' measurements
# of stream memory operations; threaded: benches/handoff.py.
EXPECTED = Shares(0.8, 1.0, 0.55, 0.4, 1.0, 18e-6, 20e-6)
BAD = Shares(0.6, 0.643, 0.4, 0.25, 0.85, 40e-6, 60e-6)
GOOD = Shares(0.92, 1.43, 0.75, 0.6, 1.1, 8e-6, 9e-6)


@dataclass(frozen=True)
class Core:
    """One core with an instruction set, from docs/performance-notes.md.

    unpack_ns, row_ns: of 16 x 64 weights in the GEMM, unpacking and each row. attention_gflops: of its fp32
    or bf16 products; bf16_gflops: on a machine with avx512_bf16, where that is another. unpack_gb_s: weights
    times one row, of formats without a grid. whole: of these rates of the driver, what whole prefills reach.
    multiply_gops: the rate of the GEMM's innermost loop beside which they were measured; a machine with
    another is so much faster or slower. 0: its products do not follow it. q8_0: how often its row_ns a row of
    Q8_0 takes. grid: of SLOW_GB_S.
    """

    unpack_ns: float
    row_ns: float
    attention_gflops: float
    unpack_gb_s: float
    whole: float
    multiply_gops: float = 0.0
    q8_0: float = 1.0
    grid: float = 1.0
    bf16_gflops: float = 0.0


# amx: the driver alone, "beside a neighbour": 119, 143, 249 and 424 ns at 16, 32, 64 and 128 rows. Not by its
# rate, which a neighbour takes to a third while the driver loses a third.
# avx512, avx2: Zen 4, two threads, weights from memory, benches/gemm.py. avx512 beside 385 GOPS a core: Q4_K
# 189, 316, 1012 and 3927 ns at 16, 32, 128 and 512 rows, Q8_0 242, 362, 1083 and 3927; here as at 480, the
# rate of an idle core. avx2 beside 140: Q4_K 324, 590 and 2250 ns at 16, 32 and 128 rows, here as at 225;
# Q8_0, whose codes do not fit sums of pairs in 16 bits, 1.5 times Q4_K. unpack_gb_s: from the second cache,
# the slowest of Q4_K, Q6_K and Q8_0, benches/gemv.py. whole: benches/plan_check.py.
# attention_gflops, "Attention without AMX": of 512 rows, over 2048 tokens up to a tenth more; avx512 without
# BF16: of the driver before. avx2vnni: not measured.
CORES = {
    "amx": Core(75, 2.75, 200, 25, 0.7),
    "avx512": Core(60, 6.0, 75, 29, 0.9, 480, bf16_gflops=129),
    "avx2vnni": Core(60, 10.0, 60, 18, 0.7, grid=0.5),
    "avx2": Core(30, 10.6, 76, 24, 0.9, 225, q8_0=1.5, grid=0.5),
    "scalar": Core(600, 600, 2, 0.5, 0.7, grid=0.5),
}
# Formats whose codes are looked up, or whose bits are in many planes: GB/s a core with AVX-512, from
# "Grid formats" there (cycles per 64 weights at 2.6 GHz).
SLOW_GB_S = {
    "iq1_s": 5.9, "iq1_m": 5.5, "iq2_xxs": 6.5, "iq2_xs": 6.2, "iq2_s": 7.6, "iq3_xxs": 7.2, "iq3_s": 7.8,
    "q3_k": 9.0, "q2_k": 11.0, "tq1_0": 6.0, "q1_0": 7.0,
}  # fmt: skip
# Rows from which the GEMM takes over; below, so many share one unpacking.
GEMM_ROWS = 8
# Rows of one sequence from which --overlap cuts a step in two (engine/batch.py).
MIN_CUT_ROWS = 64
CPU_LANE = (RAM, CPU_PRODUCTS)


@dataclass(frozen=True)
class Speed:
    """Of one phase. seconds: of one token, by what limits; `bound` is the largest. low, high: the band.

    hidden_s: of these seconds, what overlap or deferral puts beside the others, at best.
    """

    tok_s: float
    low: float
    high: float
    seconds: dict[str, float]
    hidden_s: float = 0.0

    @property
    def bound(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name])


@dataclass(frozen=True)
class Estimate:
    """None: not known, for what `missing` says. prefill: of a prompt of PROMPT_TOKENS."""

    decode: Speed | None
    prefill: Speed | None
    missing: str = ""
    assumed: tuple[str, ...] = ()  # of experts that the device shares with the CPU


def estimate(machine: Machine, job: Job, placement: Placement) -> Estimate:
    """Of one request alone."""
    missing: list[str] = []
    decode = _speed(machine, job, placement, 1, DEPTH_TOKENS, missing)
    prompt = min(PROMPT_TOKENS, job.wanted_tokens)
    rows = min(job.chunk_tokens, prompt)
    prefill = _speed(machine, job, placement, rows, prompt // 2, missing)
    return Estimate(decode, prefill, ", ".join(dict.fromkeys(missing)), tuple(_assumed(job, placement)))


def _assumed(job: Job, placement: Placement) -> Iterator[str]:
    if any(table.spare for table in placement.experts.values()):
        yield (
            "the expert cache holds the experts that the profile counts most, beside those that stay"
            if job.profile
            else "without --profile all experts are chosen equally often; other choices hit it more often"
        )
    if job.strategy != "hybrid" or not job.on_gpu:
        return
    if job.overlap:
        yield (
            "--overlap hides nothing of a prompt: a step whose experts may stream is not cut; nor is one "
            "request's decoding"
            if placement.ring
            else "--overlap hides the shorter of the device's and the CPU's time in prompts (in the bad case "
            "nothing); one request's decoding is not cut"
        )
    if job.defer_experts:
        yield "--defer-experts hides what the late experts take behind the device (in the bad case nothing)"


def _speed(
    machine: Machine, job: Job, placement: Placement, rows: int, depth: int, missing: list[str]
) -> Speed | None:
    steps = [_Step(machine, job, placement, shares, rows, depth) for shares in (EXPECTED, BAD, GOOD)]
    for step in steps:
        step.run()
        missing += step.missing
    if any(step.missing for step in steps):
        return None
    expected, bad, good = steps
    return Speed(
        tok_s=rows / (expected.total - expected.hidden),
        low=rows / bad.total,  # nothing is hidden
        high=rows / (good.total - good.hidden),
        seconds={name: value / rows for name, value in expected.seconds.items()},
        hidden_s=expected.hidden / rows,
    )


class _Step:
    """One step's seconds with one set of shares. `depth`: tokens in the cache that each row attends to."""

    def __init__(
        self, machine: Machine, job: Job, placement: Placement, shares: Shares, rows: int, depth: int
    ) -> None:
        self._machine = machine
        self._job = job
        self._placement = placement
        self._shares = shares
        self._rows = rows
        self._depth = depth
        self._gpus = {device.name: device.gpu for device in job.devices if device.gpu}
        self._core = CORES[machine.isa[-1]] if machine.isa else None
        self._pace = _pace(machine, self._core)
        self.missing: list[str] = []
        self.seconds: dict[str, float] = {}
        self.hidden = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def run(self) -> None:
        """Sets `seconds`, by what limits, and of these `hidden`."""
        self._sum(1)
        job = self._job
        if job.strategy != "hybrid" or not job.on_gpu:  # CPU threads in a GPU's place have the same cores
            return
        if job.overlap and self._rows >= MIN_CUT_ROWS and not self._placement.ring:
            self._rows //= 2
            self._sum(2)
            self.hidden = min(self._on_lane(CPU_LANE), self.total - self._on_lane(CPU_LANE))
        elif job.defer_experts and self._rows == 1:
            late = min(1.0, job.defer_experts / max(1, self._used)) * self._on_lane(CPU_LANE)
            self.hidden = min(late, self.total - self._on_lane(CPU_LANE))

    def _on_lane(self, names: tuple[str, ...]) -> float:
        return sum(self.seconds.get(name, 0.0) for name in names)

    @property
    def _used(self) -> int:
        return max((part.used for part in self._job.parts.experts.values()), default=0)

    def _sum(self, turns: int) -> None:
        """turns: so many parts of a step of `_rows` each go through the layers; embedding and head once."""
        total: dict[str, float] = defaultdict(float)
        for (name, seconds), times in self._items(turns):
            total[name] += times * seconds
        self.seconds = dict(total)

    def _items(self, turns: int) -> Iterator[tuple[tuple[str, float], int]]:
        job, modules = self._job, self._placement.modules
        for part in job.parts.dense:
            rows = 1 if part.path in ("output", "token_embd") else self._rows
            yield self._part(modules[part.path], part, rows), 1 if part.layer is None else turns
        for device in self._placement.devices:
            if device.kv_token_bytes:
                yield self._attention(device.name, device.kv_token_bytes), turns
        for layer, part in job.parts.experts.items():
            for item in self._experts(part, self._placement.experts[layer]):
                yield item, turns

    def _part(self, place: str, part: Part, rows: int) -> tuple[str, float]:
        if place in self._gpus:
            return self._on_gpu(place, part.gpu_read, part.weights, rows)
        return self._on_cpu(part.ram_read, part.weights, rows, part.formats, 1.0)

    def _attention(self, place: str, token_bytes: int) -> tuple[str, float]:
        """Reading the cache once, or the products of every row with every key and value."""
        nbytes = self._depth * token_bytes
        share = token_bytes / max(1, self._job.parts.kv_token_bytes)
        width = share * self._job.parts.attention_widths[self._rows > GEMM_ROWS]
        flops = 2 * width * self._rows * self._depth
        if place in self._gpus:
            return self._on_gpu(place, nbytes, width * self._depth, self._rows)
        read = self._ram(nbytes)
        return self._longer(RAM, read, CPU_PRODUCTS, self._cpu_seconds(flops / self._attention_rate()))

    def _experts(self, part: Part, table: ExpertTable) -> Iterator[tuple[str, float]]:
        """A layer's experts: those on the device, the others, and what handing them over takes."""
        job, used = self._job, part.used / max(1, part.count)
        touched = 1 - (1 - used) ** self._rows
        rows = self._rows * used / max(touched, 1e-9)  # of one touched expert
        chosen = _share_of_choices(job, part, table)
        here = chosen if self._rows == 1 else min(1.0, (len(table.resident) + table.spare) / part.count)
        weights = part.weights * touched
        if here:
            yield self._on_device(table.device, part, here * touched, here * weights, rows)
        if here < 1:
            away = (1 - here) * touched
            yield from self._away(table.device, part, away, (1 - here) * weights, rows)
        if job.strategy in ("stream", "hybrid"):
            yield self._handoff(table.device)
            if job.defer_experts and self._rows == 1:  # what joins late is a submission of its own
                yield self._handoff(table.device)

    def _on_device(
        self, device: str, part: Part, share: float, weights: float, rows: float
    ) -> tuple[str, float]:
        if device in self._gpus:
            return self._on_gpu(device, share * part.gpu_bytes, weights, rows)
        return self._on_cpu(share * part.ram_bytes, weights, rows, part.formats, share)

    def _away(
        self, device: str, part: Part, share: float, weights: float, rows: float
    ) -> Iterator[tuple[str, float]]:
        """Experts in RAM: multiplied there, or sent over the bus, whichever the strategy says."""
        job = self._job
        cpu = self._on_cpu(share * part.ram_bytes, weights, rows, part.formats, share)
        if not job.on_gpu or job.strategy == "cpu":
            yield cpu
            return
        products = self._on_gpu(device, share * part.gpu_bytes, weights, rows)
        sent = self._longer(LINK, self._over_link(device, share * part.gpu_bytes), *products)
        # A prompt of a hybrid takes the faster of the two, if there is a ring and a GPU reads the tiles.
        may = self._rows > GEMM_ROWS and self._placement.ring and can_move(job, part.layer or 0)
        yield sent if job.strategy == "stream" or (may and sent[1] < cpu[1]) else cpu

    def _handoff(self, device: str) -> tuple[str, float]:
        if device not in self._gpus:
            return HANDOFF, self._shares.threaded_handoff_s
        both_ways = 2 * 2 * self._rows * self._job.parts.hidden  # bf16
        return HANDOFF, self._shares.handoff_s + self._over_link(device, both_ways)

    def _on_gpu(self, name: str, nbytes: float, weights: float, rows: float) -> tuple[str, float]:
        gpu = self._gpus[name]
        read = self._rate(
            nbytes, self._shares.gpu_memory * gpu.memory_gb_s, f"the memory bandwidth of {name}"
        )
        if rows <= 1:
            return GPU_MEMORY, read
        flops = 2 * weights * rows
        rate = 1e3 * self._shares.gpu_products * gpu.bf16_tflops
        return self._longer(GPU_MEMORY, read, GPU_PRODUCTS, self._rate(flops, rate, f"the TFLOPS of {name}"))

    def _on_cpu(
        self, nbytes: float, weights: float, rows: float, formats: dict[str, int], share: float
    ) -> tuple[str, float]:
        """formats: bytes of the whole part by format, of which `share` is read."""
        read = self._ram(nbytes)
        if self._core is None:
            self.missing += ["the instruction set"] if rows > 1 else []
            return RAM, read
        core = self._core
        if rows > GEMM_ROWS:
            eight = formats.get("q8_0", 0) / max(1, sum(formats.values()))
            row_ns = core.row_ns * (1 + eight * (core.q8_0 - 1))
            ns = weights / 1024 * (core.unpack_ns + rows * row_ns)
            return self._longer(RAM, read, CPU_PRODUCTS, self._cpu_seconds(ns / 1e9))
        own = sum(share * size / 1e9 / _unpack_gb_s(core, name) for name, size in formats.items())
        return self._longer(RAM, read, CPU_PRODUCTS, own / self._machine.cores)

    def _attention_rate(self) -> float:
        if self._core is None:
            return 1.0
        bf16 = self._core.bf16_gflops if self._machine.avx512_bf16 else 0.0
        return 1e9 * (bf16 or self._core.attention_gflops)

    def _cpu_seconds(self, core_seconds: float) -> float:
        whole = min(1.0, self._core.whole * self._shares.cpu_products) if self._core else 1.0
        return core_seconds / (self._machine.cores * self._pace * whole)

    def _ram(self, nbytes: float) -> float:
        return self._rate(nbytes, self._shares.ram * self._machine.read_gb_s, "RAM's read bandwidth")

    def _over_link(self, name: str, nbytes: float) -> float:
        return self._rate(nbytes, self._shares.link * self._gpus[name].link_gb_s, f"the link of {name}")

    def _rate(self, count: float, giga_per_s: float, what: str) -> float:
        if giga_per_s <= 0:
            self.missing.append(what)
            return 0.0
        return count / giga_per_s / 1e9

    @staticmethod
    def _longer(one: str, one_s: float, other: str, other_s: float) -> tuple[str, float]:
        return (one, one_s) if one_s >= other_s else (other, other_s)


def _unpack_gb_s(core: Core, name: str) -> float:
    slow = core.grid * SLOW_GB_S[name] if name in SLOW_GB_S else core.unpack_gb_s
    return min(slow, core.unpack_gb_s)


def _pace(machine: Machine, core: Core | None) -> float:
    """How much faster the machine's cores multiply than the one that the constants are from."""
    if core is None or not core.multiply_gops or not machine.multiply_gops:
        return 1.0
    return machine.multiply_gops / machine.cores / core.multiply_gops


def _share_of_choices(job: Job, part: Part, table: ExpertTable) -> float:
    """Of a token's choices in a layer, those that fall on experts of the device.

    A cache is taken to hold what the profile counts most beside the resident ones: what it comes to if a text
    asks for the experts that the profile's text asked for. Without a profile all are chosen equally often.
    """
    counts = job.profile.counts.get(part.layer or 0, ()) if job.profile else ()
    if not sum(counts):
        return min(1.0, (len(table.resident) + table.spare) / max(1, part.count))
    held = [counts[expert] for expert in table.resident]
    others = sorted((count for e, count in enumerate(counts) if e not in table.resident), reverse=True)
    return sum(held + others[: table.spare]) / sum(counts)
