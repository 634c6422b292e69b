"""Which experts a text makes a model choose, counted by running it as prompts."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from isthmus.errors import EngineError, UsageError
from isthmus.placement.profile import Profile


def count_experts(engine: Engine, tokens: Sequence[int]) -> Profile:
    """Every token counts once, in prompts as long as the context. UsageError for a model without experts."""
    if not engine.plan.experts:
        raise UsageError(f"{engine.info.name} has no experts to count")
    counts = engine.count_experts()
    window = engine.info.context_tokens - 1
    for begin in range(0, len(tokens), window):
        prompt = list(tokens[begin : begin + window])
        params = SamplingParams(temperature=0.0, max_tokens=1)
        # A salt of its own: a repeated window found in the prefix cache would choose no experts.
        engine.add(Request(f"count {begin}", prompt, params, cache_salt=str(begin)))
        while engine.has_work:
            for output in engine.step():
                if output.error:
                    raise EngineError(output.error)
    sizes = {layer: engine.plan.experts[layer].count for layer in counts}
    by_layer = {layer: tuple(chosen[e] for e in range(sizes[layer])) for layer, chosen in counts.items()}
    return Profile(engine.info.name, len(tokens), by_layer)
