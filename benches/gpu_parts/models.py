"""Whole models, cut to a few layers: decode and prefill by strategy, memory taken, bytes over the bus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from gpu_parts.lines import Line, Setting
from gpu_parts.shapes import TINY, start
from isthmus.cli.measure import Decoder, prefill_seconds, random_prompt
from isthmus.engine.engine import Engine
from isthmus.errors import IsthmusError

# Few enough layers that all strategies load within minutes: half of DeepSeek-V3's 5 are dense.
MODELS = ("dummy:qwen3-30b-a3b?layers=12", "dummy:deepseek-v3?layers=5")
STRATEGIES = ("cpu", "stream", "hybrid", "gpu")
PROMPT, DECODE_S = 512, 2.0


def models(setting: Setting) -> Iterator[Line]:
    """Tokens per second are of these cut models; with all layers there are that many times fewer."""
    for model in TINY if setting.quick else MODELS:
        for strategy in STRATEGIES:
            what = f"{model.removeprefix('dummy:')} {strategy}"
            try:
                engine = start(setting, model, strategy=strategy, context_tokens=PROMPT * 2)
            except IsthmusError as error:
                yield Line(what, note=str(error))
                continue
            try:
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
    if engine.handed_over:
        crossed = (_crossed(engine) - before) / tokens
        yield Line(f"{what}: handed over for a token", value=crossed, unit="bytes")
    for name, taken in engine.device_bytes.items():
        yield Line(f"{what}: memory of {name}", value=taken / 1e9, unit="GB")
    decoder.end()


def _crossed(engine: Engine) -> int:
    counted = engine.handed_over
    return counted.bytes_x + counted.bytes_y + counted.bytes_routing if counted else 0
