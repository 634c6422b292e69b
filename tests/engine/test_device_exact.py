"""exact_batching on devices: the same request alone or in any company gives the same answer, bit for bit.

The devices are CPUs with the kernels' references, which multiply row by row here (tests/gpu/test_fixed.py
holds that the kernels give a row its bits too). Each token is compared with the log-probabilities of the 20
most probable ones, which show a difference in any bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGMLQuantizationType as GgmlType

from engine.stand_in import runner_of, start
from engine.test_together import same
from isthmus.engine.engine import Engine
from isthmus.engine.request import Output, Request, SamplingParams
from isthmus.errors import DeviceError
from isthmus.placement.profile import Profile
from models import tiny
from models.steps import prompt_of

CONTEXT = 256
BEGINNING, TAILS = prompt_of(66, tiny.VOCAB, 1), [prompt_of(n, tiny.VOCAB, n) for n in (5, 14, 27)]
PROMPTS = [BEGINNING + TAILS[0], TAILS[1] * 3, TAILS[2], BEGINNING[:64] + TAILS[1]]
WAYS = [{"temperature": 0.0}, {"temperature": 0.0}, {"seed": 7, "top_p": 0.9}, {"seed": 9}]
REQUESTS = [
    Request(str(i), prompt, SamplingParams(**way, max_tokens=10, logprobs=20))  # type: ignore[arg-type]
    for i, (prompt, way) in enumerate(zip(PROMPTS, WAYS, strict=True))
]


def kinds(name: str, values: Any) -> gguf.GGMLQuantizationType:
    """Experts a device reads, dense parts in tiles and plain."""
    if name.endswith(".bias") or "sinks" in name:
        return GgmlType.F32
    if "_exps" in name or "ffn_down" in name or name == "output.weight":
        return GgmlType.Q8_0
    return GgmlType.F32 if "attn_q" in name else GgmlType.BF16 if values.ndim > 1 else GgmlType.F32


def kinds_of_gpt_oss(name: str, values: Any) -> gguf.GGMLQuantizationType:
    """Experts as they are published."""
    return GgmlType.MXFP4 if name.endswith("_exps.weight") else kinds(name, values)


def write(name: str, folder: Path) -> Path:
    case = tiny.CASES[name]
    of = kinds_of_gpt_oss if name == "gpt-oss" else kinds
    return tiny.write_case(folder / f"{name}.gguf", case, tiny.build(case), of)


@pytest.fixture(scope="module", params=["qwen3moe", "deepseek-v3", "gpt-oss"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module", params=["qwen2moe", "gpt-oss"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a shared expert behind a gate; with biases and a clamped activation."""
    return write(request.param, tmp_path_factory.mktemp("shared"))


def run(engine: Engine, requests: Any) -> dict[str, list[Output]]:
    for request in requests:
        engine.add(request)
    events: dict[str, list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            events.setdefault(output.request_id, []).append(output)
    return events


def exact(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    wanted = {"exact_batching": True, "context_tokens": CONTEXT} | options
    return start(path, monkeypatch, **wanted)


COMPANY: dict[str, dict[str, Any]] = {
    "together": {"parallel": 6},
    "in chunks, with drafts": {"parallel": 4, "chunk_tokens": 40, "speculate": "ngram"},
    "in halves, on two": {"parallel": 4, "overlap": True, "gpus": 2},
    "late experts": {"parallel": 4, "defer_experts": 1, "overlap": True},
    "a cache of q8_0": {
        "parallel": 4,
        "kv_dtype": "q8_0",
        "chunk_tokens": 40,
        "speculate": "ngram",
        "gpus": 2,
    },
}


@pytest.fixture(scope="module")
def alone(path: Path) -> Callable[[int, str], dict[str, list[Output]]]:
    """By how many experts are late and the cache's type: each request in an engine of its own."""

    @cache
    def answers(defer: int, kv_dtype: str) -> dict[str, list[Output]]:
        events: dict[str, list[Output]] = {}
        with pytest.MonkeyPatch.context() as monkeypatch:
            for request in REQUESTS:
                engine = exact(path, monkeypatch, parallel=1, defer_experts=defer, kv_dtype=kv_dtype)
                events |= run(engine, [request])
                engine.close()
        return events

    return answers


@pytest.mark.parametrize("company", COMPANY)
def test_company_changes_no_bit(
    path: Path,
    alone: Callable[[int, str], dict[str, list[Output]]],
    monkeypatch: pytest.MonkeyPatch,
    company: str,
) -> None:
    options = COMPANY[company]
    wanted = alone(options.get("defer_experts", 0), options.get("kv_dtype", "bf16"))
    engine = exact(path, monkeypatch, **options)
    for _ in range(2):  # the second time from the prefix cache
        for name, events in run(engine, REQUESTS).items():
            assert same(events) == same(wanted[name]), f"request {name}"
    assert engine.stats().cached_tokens > 0
    assert runner_of(engine)._captured
    engine.close()


@pytest.mark.parametrize(("strategy", "kv_dtype"), [("gpu", "bf16"), ("stream", "q8_0"), ("hybrid", "bf16")])
def test_wherever_experts_are(
    shared: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, kv_dtype: str, tmp_path: Path
) -> None:
    """All on the device, streamed at every step, and some there by a profile: these stay where they are."""
    options: dict[str, Any] = {"strategy": strategy, "kv_dtype": kv_dtype}
    if strategy == "hybrid":
        written = tmp_path / "profile.json"
        written.write_text(Profile("tiny", 1, {1: (0, 3, 0, 0, 9, 0, 1, 0)}).to_json())
        options["profile"] = str(written)
    together, one = (exact(shared, monkeypatch, parallel=parallel, **options) for parallel in (6, 1))
    events, alone = run(together, REQUESTS), run(one, REQUESTS)  # one after the other
    assert {name: same(of) for name, of in events.items()} == {name: same(of) for name, of in alone.items()}
    if strategy != "gpu":
        assert together.expert_use is not None
        assert together.expert_use.hits > 0
    together.close()
    one.close()


def test_without_it_company_shows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared above can differ."""
    together, one = (
        start(path, monkeypatch, parallel=parallel, context_tokens=CONTEXT) for parallel in (6, 1)
    )
    events, alone = run(together, REQUESTS), run(one, REQUESTS)
    assert {name: same(of) for name, of in events.items()} != {name: same(of) for name, of in alone.items()}
    together.close()
    one.close()


def test_what_would_move_experts_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in ({"expert_cache": 1 << 20}, {"stream_rows": 40}):
        with pytest.raises(DeviceError, match="other requests would decide which of them computes an expert"):
            exact(path, monkeypatch, **option)
