"""The measurement of `isthmus bench`: prefill, then slices of decoding between slices of plain reading.

On a shared machine the memory's speed drifts by tens of percent within a minute. Each slice of decoding is
therefore divided by the slices of reading just before and after it; the share is the median of these ratios.
"""

from __future__ import annotations

import random
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from isthmus import __version__, native
from isthmus.cli.memory_states import between, memory_states
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from isthmus.errors import EngineError
from isthmus.placement.machine import Machine

READ_BYTES = 1 << 30  # far beyond any cache
SLICE_S = 0.5  # longest, unless one token takes longer
SHORTEST_SLICE_S = 0.1  # below this the ends of a slice count for too much
MIN_SLICES = 15

Watch = Callable[[str], None]  # what is being done, for a status line


def unwatched(text: str) -> None: ...


@dataclass(frozen=True)
class DecodeSlice:
    """A slice of decoding."""

    tokens: int
    seconds: float
    bytes_read: float  # weights and cache that the tokens made the CPU read
    bus_bytes: int  # that crossed between a device and the host
    op_seconds: dict[str, float]  # by kind of operator


def measure(
    engine: Engine,
    prompt_tokens: int,
    new_tokens: int,
    prefills: Sequence[float],
    multiplied: Sequence[float],
    watch: Watch = unwatched,
) -> dict[str, Any]:
    """The object that --json prints.

    prefills: tok/s of each prompt of `prompt_tokens` that was measured; multiplied: GOPS of int8 products
    of all threads, right before each.
    """
    return {
        "model": engine.info.name,
        "isa": native.current_isa(),
        "threads": engine.info.threads,
        "strategy": engine.info.strategy,
        "devices": engine.info.devices,
        "device_bytes": engine.device_bytes,  # at most, so far
        "handoff": engine.info.handoff,
        "prefill_tok_s": median(prefills),
        "prefill_runs_tok_s": list(prefills),
        "multiply_gops": median(multiplied),
        **measure_decode(engine, prompt_tokens, new_tokens, watch),
        "handed_over": asdict(engine.handed_over) if engine.handed_over else None,
        "experts": asdict(use) if (use := engine.expert_use) else None,
        "peak_ram_bytes": peak_ram_bytes(),
        "commit": commit(),
    }


def measure_decode(
    engine: Engine, prompt_tokens: int, new_tokens: int, watch: Watch = unwatched
) -> dict[str, Any]:
    """The figures of decoding alone, after a prompt of random tokens."""
    prompt = random_prompt(prompt_tokens, engine.info.vocab_size, seed=9)
    decoded, readings = _decode_slices(engine, prompt, new_tokens, watch)
    tokens, seconds = sum(one.tokens for one in decoded), sum(one.seconds for one in decoded)
    shares = {kind: sum(one.op_seconds[kind] for one in decoded) / seconds for kind in decoded[0].op_seconds}
    shares["between"] = 1.0 - sum(shares.values())  # sampling, the loop, and Python
    bytes_per_token = sum(one.bytes_read for one in decoded) / tokens
    bus_bytes = sum(one.bus_bytes for one in decoded)
    rates = [one.tokens / one.seconds for one in decoded]
    beside = between([one.bytes_read / one.seconds / 1e9 for one in decoded], readings)
    return {
        "decode_tok_s": median(rates),
        "decode_slices_tok_s": rates,
        "bytes_per_token": round(bytes_per_token),
        "read_gb_s": bytes_per_token * median(rates) / 1e9,
        "read_limit_gb_s": max(readings),
        "decode_share": median(one.share for one in beside),
        "memory_states": memory_states(beside),
        "outside_products_share": 1.0 - sum(shares[kind] for kind in native.PRODUCTS),
        "step_shares": shares,
        "bus_bytes_per_token": bus_bytes / tokens,
        "link_share": _link_share(engine, bus_bytes / seconds),
    }


def _decode_slices(
    engine: Engine, prompt: list[int], new_tokens: int, watch: Watch
) -> tuple[list[DecodeSlice], list[float]]:
    """At least MIN_SLICES and `new_tokens` tokens, each of a length between the two bounds; and what reading
    gave before each and after the last, GB/s."""
    watch("what the memory gives")
    probe = native.ReadProbe(READ_BYTES)
    probe.run(SHORTEST_SLICE_S)  # the first touch of its pages
    decoder = Decoder(engine, prompt, watch)
    started = time.perf_counter()
    decoder.token()
    token_s = time.perf_counter() - started
    # 15 slices over the tokens asked for, if that makes them neither too long nor too short.
    slice_s = min(max(token_s * new_tokens / MIN_SLICES, SHORTEST_SLICE_S), SLICE_S)
    decoded: list[DecodeSlice] = []
    readings = [probe.run(slice_s)]
    while len(decoded) < MIN_SLICES or sum(one.tokens for one in decoded) < new_tokens:
        decoder.doing = f"decode, slice {len(decoded) + 1} of at least {MIN_SLICES}"
        decoder.ensure_running()
        decoded.append(_decode_slice(decoder, slice_s))
        readings.append(probe.run(slice_s))
    decoder.end()  # the engine may be measured again
    return decoded, readings


def _decode_slice(decoder: Decoder, slice_s: float) -> DecodeSlice:
    """As many tokens as `slice_s` seconds hold, as far as the last ones tell, and at least one."""
    tokens, seconds, bytes_read = 0, 0.0, 0.0
    before, crossed = native.op_seconds(), bus_bytes(decoder.engine)
    started = time.perf_counter()
    while tokens == 0 or (not decoder.finished and seconds * (tokens + 1) / tokens <= slice_s):
        bytes_read += decoder.token()
        tokens += 1
        seconds = time.perf_counter() - started
    spent = {kind: total - before[kind] for kind, total in native.op_seconds().items()}
    return DecodeSlice(tokens, seconds, bytes_read, bus_bytes(decoder.engine) - crossed, spent)


def bus_bytes(engine: Engine) -> int:
    """Rows and routing handed over, experts streamed and cached, so far."""
    over, use = engine.handed_over, engine.expert_use
    rows = over.bytes_x + over.bytes_y + over.bytes_routing if over else 0
    return rows + (use.bytes_streamed + use.bytes_uploaded if use else 0)


def _link_share(engine: Engine, bytes_s: float) -> float | None:
    """Of what the link of the GPU gives by its generation and width; None without a GPU, or if not known."""
    if not any(name.startswith("cuda") for name in engine.device_bytes):
        return None
    links = [gpu.link_gb_s for gpu in Machine.detect().gpus]
    return bytes_s / 1e9 / links[0] if links and links[0] else None


def peak_ram_bytes() -> int:
    """The most that was resident, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Decoder:
    """An endless answer: when the context is full, the same prompt starts again, outside the slices."""

    def __init__(self, engine: Engine, prompt: list[int], watch: Watch = unwatched) -> None:
        self.engine = engine
        self.doing = "decode"  # for `watch`
        self._watch = watch
        self._prompt = prompt
        self.finished = True
        self.ensure_running()

    def ensure_running(self) -> None:
        if self.finished:
            self.engine.add(Request("bench", self._prompt, SamplingParams(temperature=0.0)))
            self.finished = False
            while not self._step():
                pass

    def token(self) -> float:
        """Decodes one token; returns the bytes this read: the active weights, and the cache up to here."""
        depth = self.engine.num_computed("bench") + 1
        self._step()
        return self.engine.plan.decode_weight_bytes + depth * self.engine.plan.kv_token_bytes

    def end(self) -> None:
        self.engine.cancel("bench")
        while self.engine.has_work:
            self.engine.step()

    def _step(self) -> bool:
        """One step; True if it gave a token."""
        outputs = self.engine.step()
        for output in outputs:
            if output.error:
                raise EngineError(output.error)
            self.finished = output.finish_reason is not None
        self._watch(f"{self.doing}: {self.engine.num_computed('bench')} tokens in the cache")
        return bool(outputs)


def commit() -> str:
    """The commit this runs from, with + if files differ from it; the version where it is no checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if git("ls-files", "--error-unmatch", Path(__file__).name) == "":
            return __version__
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return __version__


def random_prompt(count: int, vocab_size: int, seed: int) -> list[int]:
    """Random tokens: experts are chosen as evenly as they get."""
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(count)]


def prefill_seconds(engine: Engine, prompt: list[int], watch: Watch = unwatched) -> float:
    """Seconds from the first step to the first token."""
    # A salt of its own: none of it may be found in the prefix cache.
    salt = str(time.monotonic_ns())
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.add(Request("prefill", prompt, params, cache_salt=salt))
    started = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise EngineError(output.error)
        if engine.has_work:
            watch(f"{engine.num_computed('prefill')} of {len(prompt)} tokens")
    return time.perf_counter() - started
