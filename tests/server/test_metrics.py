"""`/metrics`, `/slots` and `/ready`: what an operator sees."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
from harness import RawStream, Server, chat_body, serving, wait_for
from prometheus_client.parser import text_string_to_metric_families

from isthmus.engine.process import EngineProcess
from isthmus.engine.request import EngineStats, TierStats
from isthmus.server.metrics import Metrics


def samples(server: Server) -> dict[str, float]:
    """Name, with the value of its first label if it has one -> number."""
    return samples_in(httpx.get(f"{server.url}/metrics").text)


def samples_in(text: str) -> dict[str, float]:
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_requests_are_counted_by_how_they_ended(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        url = f"{server.url}/v1/chat/completions"
        httpx.post(url, json=chat_body("hello"))
        httpx.post(url, json=chat_body("hello", max_tokens=2))
        httpx.post(url, json=chat_body("hello", script={"end": "error"}))
        seen = samples(server)
    for reason in ("stop", "length", "error"):
        assert seen[f"isthmus_request_success_total/{reason}"] == 1
    assert seen["isthmus_time_to_first_token_seconds_count"] == 3
    assert seen["isthmus_inter_token_latency_seconds_count"] == 4 + 1 + 4
    assert seen["isthmus_engine_up"] == 1


def test_client_that_leaves_is_counted(gated: Server) -> None:
    with RawStream(gated, chat_body("x")):
        wait_for(lambda: gated.engine.num_requests == 1)
    wait_for(lambda: gated.engine.num_requests == 0)
    assert samples(gated)["isthmus_request_success_total/abort"] == 1


def test_names_are_those_of_vllm(server: Server) -> None:
    names = samples(server)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "e2e_request_latency_seconds_sum",
    ):
        assert f"isthmus_{name}" in names


def test_tiers_are_told_apart_by_a_label() -> None:
    tiers = (TierStats("ram", 2, 2048, read=3, written=4), TierStats("disk", 5, 5120, 6, 7, 8, 9))
    engine = SimpleNamespace(
        stats=EngineStats(num_loading=1, tiers=tiers),
        state="ready",
        info=None,
        num_restarts=0,
        expert_read_rate=0.0,
    )
    seen = samples_in(Metrics(cast(EngineProcess, engine)).text().decode())
    assert seen["isthmus_num_requests_loading"] == 1
    assert [seen[f"isthmus_kv_tier_bytes/{name}"] for name in ("ram", "disk")] == [2048, 5120]
    counted = [f"isthmus_kv_tier_{name}_blocks_total" for name in ("read", "written", "dropped", "failed")]
    assert [[seen[f"{name}/{tier}"] for name in counted] for tier in ("ram", "disk")] == [
        [3, 4, 0, 0],
        [6, 7, 8, 9],
    ]


def test_the_rate_of_expert_reads_is_that_of_the_last_steps(gated: Server) -> None:
    """The counters only grow; steps that read no expert leave the rate as it was."""
    for seconds, read in ((0.5, 10**9), (0.75, 2 * 10**9), (0.75, 2 * 10**9)):
        gated.engine._take_stats(EngineStats(expert_read_bytes=read, expert_seconds=seconds))
    seen = samples(gated)
    assert seen["isthmus_expert_read_bytes_total"] == 2e9
    assert seen["isthmus_expert_read_seconds_total"] == 0.75
    assert seen["isthmus_expert_read_bytes_per_second"] == 4e9


def test_slots_of_an_idle_server(server: Server) -> None:
    (slot,) = httpx.get(f"{server.url}/slots").json()
    assert slot == {"id": 0, "n_ctx": 2048, "is_processing": False}


def test_ready_is_503_until_the_model_is_loaded(tmp_path: Path) -> None:
    with serving(tmp_path, ready=False, flags="slow") as server:
        answer = httpx.get(f"{server.url}/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        assert int(answer.headers["retry-after"]) > 0
        server.grant(100)
        server.wait_ready()
        assert httpx.get(f"{server.url}/ready").json()["model"] == "fake"
