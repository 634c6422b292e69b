"""Numbers for Prometheus. Behind `isthmus_` the names are vLLM's: its dashboards need one replacement.

What the engine counts is read from its last report when somebody asks; what only the HTTP side sees
(latencies, how requests ended) is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from isthmus.server.timing import Timing

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from isthmus.engine.process import EngineProcess
    from isthmus.engine.request import TierStats

# vLLM's own steps, cut where a slow host or a long prompt is still told apart.
_FIRST_TOKEN_S = (0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_GAP_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_WHOLE_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """Of one server; nothing is global, so that several may live in one process."""

    def __init__(self, engine: EngineProcess) -> None:
        registry = self.registry = CollectorRegistry()
        self._first_token = Histogram(
            "isthmus_time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._gap = Histogram(
            "isthmus_inter_token_latency_seconds",
            "From one token of a request to its next",
            buckets=_GAP_S,
            registry=registry,
        )
        self._whole = Histogram(
            "isthmus_e2e_request_latency_seconds",
            "From a request's arrival at the engine to its end",
            buckets=_WHOLE_S,
            registry=registry,
        )
        self._ended = Counter(
            "isthmus_request_success",
            "Requests by how they ended",
            ["finished_reason"],
            registry=registry,
        )
        registry.register(_EngineCollector(engine))

    def token_came(self, timing: Timing, gap_s: float | None) -> None:
        """`gap_s`: since the token before it; None for the first."""
        if gap_s is None:
            self._first_token.observe(timing.first_token_s)
        else:
            self._gap.observe(gap_s)

    def request_ended(self, timing: Timing, reason: str) -> None:
        """`reason`: stop, length, tool_calls, error or client gone."""
        self._ended.labels(reason.replace("client gone", "abort")).inc()
        if timing.first_at is not None:
            self._whole.observe(timing.last_at - timing.added_at)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own numbers, as of its last report."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        used = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        gauges = {
            "num_requests_running": ("Requests that are computed", stats.num_running),
            "num_requests_waiting": ("Requests that wait for their turn", stats.num_waiting),
            "num_requests_loading": ("Of these, whose prefix is being read from a tier", stats.num_loading),
            "kv_cache_usage_perc": ("Share of the KV cache that running requests hold, 0 to 1", used),
            "engine_up": ("1 while requests are taken", float(self._engine.state == "ready")),
            "expert_read_bytes_per_second": (
                "Rate at which steps read routed experts, as of the last ones that did",
                self._engine.expert_read_rate,
            ),
            "weight_bytes": ("Bytes of the loaded weights", _weight_bytes(self._engine)),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens of all requests", stats.prompt_tokens),
            "generation_tokens": ("Tokens of all answers", stats.output_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", stats.prompt_tokens),
            "prefix_cache_hits": ("Of these, found", stats.cached_tokens),
            "num_preemptions": (
                "Requests whose cache was given up and computed again",
                stats.preemptions,
            ),
            "spec_decode_num_draft_tokens": ("Tokens guessed by speculation", stats.drafted_tokens),
            "spec_decode_num_accepted_tokens": ("Of these, right", stats.accepted_tokens),
            "engine_steps": ("Forward passes", stats.steps),
            "engine_step_seconds": ("Seconds in forward passes", stats.step_seconds),
            "expert_read_bytes": ("Bytes of routed experts that steps have read", stats.expert_read_bytes),
            "expert_read_seconds": ("Seconds in which they were read", stats.expert_seconds),
            "engine_restarts": ("Times the engine was started again", self._engine.num_restarts),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"isthmus_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"isthmus_{name}", text, value=value)
        yield from _of_tiers(stats.tiers)


def _of_tiers(tiers: tuple[TierStats, ...]) -> Iterator[Metric]:
    """Of --kv-ram and --kv-disk, by tier; nothing where there are none."""
    counters = {
        "read": "Blocks found in a tier below the cache, and right",
        "written": "Blocks given to a tier below the cache",
        "dropped": "Blocks that a tier did not take, since too much waited to be written",
        "failed": "Blocks that were damaged or gone, or could not be read or written",
    }
    if not tiers:
        return
    held = GaugeMetricFamily("isthmus_kv_tier_bytes", "Bytes that a tier below holds", labels=["tier"])
    for tier in tiers:
        held.add_metric([tier.name], tier.num_bytes)
    yield held
    for name, text in counters.items():
        family = CounterMetricFamily(f"isthmus_kv_tier_{name}_blocks", text, labels=["tier"])
        for tier in tiers:
            family.add_metric([tier.name], getattr(tier, name))
        yield family


def _weight_bytes(engine: EngineProcess) -> float:
    return float(engine.info.weight_bytes) if engine.info is not None else 0.0
