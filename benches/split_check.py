"""Whether every way to divide a model's work gives the bits of the CPU alone, at the shapes of real models.

python benches/split_check.py [MODEL]...

MODEL: a file or dummy:SHAPE; by default two layers of Qwen3-30B-A3B (2 GB) and of DeepSeek-V3, a dense one
and one of 256 experts (10 GB). The CPU stands in for the GPU, under exact_batching: two prompts in one step,
one of them a chunk, and decodes of both. A line for each way: its logits' largest difference from the CPU's,
how many rows were compared, and what was handed over, computed on the device or streamed; so that an option
that was not heard shows. Exit code 1 if any bit differs. The tests do the same with tiny models.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import report
from isthmus.cli.measure import random_prompt
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from isthmus.engine.scheduler import StepPlan
from isthmus.modules.split import ExpertUse
from isthmus.native.handoff import Counters
from isthmus.placement.profile import Profile

MODELS = ("dummy:qwen3-30b-a3b?layers=2", "dummy:deepseek-v3?layers=2")
PROMPTS, TOKENS = (40, 9), 6
WAYS: dict[str, dict[str, Any]] = {
    "hybrid": {"strategy": "hybrid", "device": "cpu"},
    "overlap": {"strategy": "hybrid", "device": "cpu", "overlap": True},
    "two devices": {"strategy": "hybrid", "device": "cpu:0,1"},
    "hot experts": {"strategy": "hybrid", "device": "cpu"},  # with a profile
    "streaming prefill": {"strategy": "hybrid", "device": "cpu", "stream_rows": 2},
    "stream": {"strategy": "stream", "device": "cpu"},
    "gpu": {"strategy": "gpu", "device": "cpu"},
}
HOT = 8  # experts of each layer


@dataclass(frozen=True)
class Ran:
    logits: list[Tensor]  # of every step
    experts: dict[int, int]  # of each layer that has them
    handed_over: Counters | None
    use: ExpertUse | None


def main() -> int:
    models, differ = sys.argv[1:] or MODELS, 0
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            alone = run(model, {"strategy": "cpu"})
            profile = Path(folder) / "profile.json"
            profile.write_text(profile_of(alone).to_json())
            for way, options in WAYS.items():
                hot = {"profile": str(profile)} if way == "hot experts" else {}
                ran = run(model, options | hot)
                pairs = list(zip(ran.logits, alone.logits, strict=True))
                differ += any(not torch.equal(mine, theirs) for mine, theirs in pairs)
                use, over = ran.use or ExpertUse(), ran.handed_over
                report(
                    model=model,
                    way=way,
                    difference=max(float((mine - theirs).abs().max()) for mine, theirs in pairs),
                    rows=sum(map(len, ran.logits)),
                    submits=over.submits if over else 0,
                    on_device=use.hits,
                    by_cpu=use.misses,
                    streamed=use.streamed,
                )
    return 1 if differ else 0


def run(model: str, options: dict[str, Any]) -> Ran:
    ran = answered(model, options)
    gc.collect()  # the weights: they stand in a cycle with who watches the steps
    return ran


def answered(model: str, options: dict[str, Any]) -> Ran:
    wanted = {"exact_batching": True, "context_tokens": 128, "parallel": len(PROMPTS)} | options
    engine = Engine(Path(model), RunOptions.from_kwargs(**wanted))
    seen: list[Tensor] = []
    execute = engine._executor.execute

    def watched(plan: StepPlan) -> Any:
        logits: Any = execute(plan)
        seen.append(logits.clone())
        return logits

    engine._executor.execute = watched  # type: ignore[method-assign]
    for index, length in enumerate(PROMPTS):
        prompt = random_prompt(length, engine.info.vocab_size, seed=index)
        engine.add(Request(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS)))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
    experts = {layer: router.config.experts for layer, router in engine._routers.items()}
    ran = Ran(seen, experts, engine.handed_over, engine.expert_use)
    engine.close()
    return ran


def profile_of(ran: Ran) -> Profile:
    """By which the first experts of each layer are worth a place on the device."""
    counts = {layer: (1,) * HOT + (0,) * (count - HOT) for layer, count in ran.experts.items()}
    return Profile("split_check", 1, counts)


if __name__ == "__main__":
    sys.exit(main())
