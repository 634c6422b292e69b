"""What overlap and deferral give: the same steps by `hybrid`, `--overlap` and `--defer-experts`, in rounds.

python benches/turns.py [MODEL] [DEFER]

MODEL: a file or dummy:SHAPE (dummy:qwen3-30b-a3b?layers=4); DEFER: experts that are late (half of them). On
a machine without a GPU both devices are the same cores, so what runs beside something takes its cycles: what
is seen here is what taking turns costs, not what it gives. Milliseconds of a step are medians over rounds;
`of_hybrid` is the median of ratios within a round. Idle shares are one traced step's, as `bench --trace` has
them; a lane counts as busy while a call waits for the cores that the other's has.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

from common import report, setting
from isthmus.cli.measure import prefill_seconds, random_prompt
from isthmus.cli.trace import DEVICE, EXPERTS, trace_step
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams

ROUNDS = 7
SEQUENCES = (1, 2, 4, 8)
PROMPT_TOKENS = 512
STEPS = 6  # decodes of one round


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "dummy:qwen3-30b-a3b?layers=4"
    defer = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    ways = {"hybrid": {}, "overlap": {"overlap": True}, f"defer {defer}": {"defer_experts": defer}}
    engines = {name: engine_of(model, options) for name, options in ways.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(ROUNDS + 1):
        for name, engine in engines.items():
            prompt = random_prompt(PROMPT_TOKENS, engine.info.vocab_size, seed=turn)
            measured = {f"prefill {PROMPT_TOKENS}": prefill_seconds(engine, prompt)}
            measured |= {f"decode of {count}": decode_seconds(engine, count, turn) for count in SEQUENCES}
            for what, seconds in measured.items() if turn else ():  # the first round warms up
                times.setdefault((what, name), []).append(seconds)
    for (what, name), seconds in times.items():
        ratios = [mine / plain for mine, plain in zip(seconds, times[what, "hybrid"], strict=True)]
        step_ms = round(1e3 * median(seconds), 2)
        report(step=what, way=name, ms=step_ms, of_hybrid=round(median(ratios), 3), **setting())
    for name, engine in engines.items():
        step = trace_step(engine, 32, 4)
        device, experts = (round(step.idle_share(lane), 2) for lane in (DEVICE, EXPERTS))
        report(step="decode of 4, traced", way=name, device_idle=device, experts_idle=experts)
        engine.close()


def engine_of(model: str, options: dict[str, object]) -> Engine:
    chosen = {"strategy": "hybrid", "device": "cpu", "parallel": max(SEQUENCES), "context_tokens": 1024}
    return Engine(Path(model), RunOptions.from_kwargs(**chosen, **options))


def decode_seconds(engine: Engine, sequences: int, seed: int) -> float:
    """Of one step: the quickest of STEPS, after prompts of 16 tokens."""
    for i in range(sequences):
        prompt = random_prompt(16, engine.info.vocab_size, seed=1000 * seed + i)
        engine.add(Request(f"decode {i}", prompt, SamplingParams(temperature=0.0)))
    while len(engine.step()) < sequences:
        pass
    best = float("inf")
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.step()
        best = min(best, time.perf_counter() - started)
    for i in range(sequences):
        engine.cancel(f"decode {i}")
    while engine.has_work:
        engine.step()
    return best


if __name__ == "__main__":
    main()
