"""Whole models, cut to a few layers: decode and prefill by strategy, memory taken, bytes over the bus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from gpu_parts.lines import Line, Setting, apart
from gpu_parts.shapes import TINY, start
from isthmus.cli.measure import Decoder, prefill_seconds, random_prompt
from isthmus.engine.engine import Engine

# Few enough layers that all strategies load within minutes: more than half of DeepSeek-V3's 5 are dense.
QWEN3, DEEPSEEK = "dummy:qwen3-30b-a3b?layers=12", "dummy:deepseek-v3?layers=5"
STRATEGIES = ("hybrid", "cpu", "stream", "gpu")  # in order of worth, should the time run out
PROMPT, DECODE_S = 512, 2.0


def qwen3(setting: Setting) -> Iterator[Line]:
    yield from _by_strategy(setting, TINY[0] if setting.quick else QWEN3)


def deepseek(setting: Setting) -> Iterator[Line]:
    yield from _by_strategy(setting, TINY[1] if setting.quick else DEEPSEEK)


def _by_strategy(setting: Setting, model: str) -> Iterator[Line]:
    """Tokens per second are of these cut models; with all layers there are that many times fewer. What breaks
    one strategy leaves the others."""
    for strategy in STRATEGIES:
        what = f"{model.removeprefix('dummy:')} {strategy}"
        yield from apart(what, _of_strategy(setting, model, strategy, what))


def _of_strategy(setting: Setting, model: str, strategy: str, what: str) -> Iterator[Line]:
    engine = start(setting, model, strategy=strategy, context_tokens=PROMPT * 2)
    try:
        yield Line(f"{what}: loaded in", value=engine.info.load_seconds, unit="s")
        yield from _ran(engine, what) if setting.quick else _measured(engine, what)
    finally:
        engine.close()


def _ran(engine: Engine, what: str) -> Iterator[Line]:
    prefill_seconds(engine, random_prompt(8, engine.info.vocab_size, seed=0))
    yield Line(what, note="runs; nothing was measured")


def _measured(engine: Engine, what: str) -> Iterator[Line]:
    vocab = engine.info.vocab_size
    prefill_seconds(engine, random_prompt(PROMPT, vocab, seed=0))
    seconds = median(prefill_seconds(engine, random_prompt(PROMPT, vocab, seed=1 + i)) for i in range(3))
    yield Line(f"{what}: prefill of {PROMPT}", value=PROMPT / seconds, unit="tok/s")
    decoder = Decoder(engine, random_prompt(PROMPT, vocab, seed=9))
    for _ in range(4):
        decoder.token()
    before, tokens, begin = _crossed(engine), 0, time.perf_counter()
    while time.perf_counter() - begin < DECODE_S:
        decoder.ensure_running()
        decoder.token()
        tokens += 1
    seconds = time.perf_counter() - begin
    yield Line(f"{what}: decode after {PROMPT}", value=tokens / seconds, unit="tok/s")
    if engine.handed_over or engine.expert_use:
        crossed = [after - was for after, was in zip(_crossed(engine), before, strict=True)]
        yield Line(f"{what}: activations over the bus for a token", value=crossed[0] / tokens, unit="bytes")
        yield Line(f"{what}: weights over the bus for a token", value=crossed[1] / tokens, unit="bytes")
    for name, taken in engine.device_bytes.items():
        yield Line(f"{what}: memory of {name}", value=taken / 1e9, unit="GB")
    decoder.end()


def _crossed(engine: Engine) -> tuple[int, int]:
    """(activations and choices of experts, experts) so far, in bytes."""
    counted, use = engine.handed_over, engine.expert_use
    rows = counted.bytes_x + counted.bytes_y + counted.bytes_routing if counted else 0
    return rows, use.bytes_streamed + use.bytes_uploaded if use else 0
