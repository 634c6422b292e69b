"""--strategy stream, and streaming for long prompts: what the engine runs, and what it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from models import tiny

LAYERS, EXPERTS, TOP_K, NEW = 2, 8, 3, 4
PROMPT = list(range(1, 90))
EXPERT_BYTES = 3 * 64 * 32 * 4  # gate, up and down of 64 x 32 in fp32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES["qwen3moe"]
    return tiny.write_case(tmp_path_factory.mktemp("stream") / "tiny.gguf", case, tiny.build(case))


def run(path: Path, **options: Any) -> tuple[list[int | None], Engine]:
    """(the answer's tokens, the engine that gave it)"""
    engine = Engine(path, RunOptions.from_kwargs(threads=2, **options))
    engine.add(Request("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=NEW)))
    tokens = []
    while engine.has_work:
        tokens += [output.token for output in engine.step()]
    return tokens, engine


def test_stream_gives_the_cpus_answer_and_counts_what_crossed(path: Path) -> None:
    wanted, _ = run(path, strategy="cpu")
    tokens, engine = run(path, strategy="stream", device="cpu")
    assert (tokens, engine.info.strategy) == (wanted, "stream")
    use = engine.expert_use
    assert use is not None
    assert engine.handed_over is None
    # All 8 for the prompt; at each of the other steps the 3 that its one token chose.
    assert use.streamed == LAYERS * (EXPERTS + (NEW - 1) * TOP_K)
    assert use.bytes_streamed == use.streamed * EXPERT_BYTES
    assert (use.hits, use.misses) == (LAYERS * TOP_K * (len(PROMPT) + NEW - 1), 0)


@pytest.mark.parametrize(("rows", "streams"), [(1, True), (len(PROMPT) + 1, False)])
def test_long_prompts_stream_experts_of_so_many_rows(path: Path, rows: int, streams: bool) -> None:
    wanted, _ = run(path, strategy="cpu", exact_batching=True)
    tokens, engine = run(path, strategy="hybrid", device="cpu", exact_batching=True, stream_rows=rows)
    assert tokens == wanted
    assert engine.plan.ring
    use, over = engine.expert_use, engine.handed_over
    assert use is not None
    assert over is not None
    assert use.streamed == (LAYERS * EXPERTS if streams else 0)
    assert use.hits == (LAYERS * TOP_K * len(PROMPT) if streams else 0)
    assert use.hits + use.misses == LAYERS * TOP_K * (len(PROMPT) + NEW - 1)
    assert over.submits == over.waits == LAYERS * (NEW - 1 + (0 if streams else 1))


def test_the_cpu_in_a_gpus_place_streams_nothing_by_itself(path: Path) -> None:
    _, engine = run(path, strategy="hybrid", device="cpu")
    assert not engine.plan.ring
    assert engine.expert_use is not None
    assert engine.expert_use.streamed == 0


def test_a_step_that_fails_leaves_the_ring_fit_for_the_next(path: Path) -> None:
    engine = Engine(path, RunOptions(threads=2, strategy="stream", device="cpu"))

    def answer(name: str) -> list[Any]:
        engine.add(Request(name, PROMPT, SamplingParams(temperature=0.0, max_tokens=NEW)))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        return outputs

    good = [output.token for output in answer("before")]
    ffn = engine._runner.model.layers[-1].ffn  # type: ignore[attr-defined]
    plain = ffn.router
    ffn.router = lambda x: (plain(x)[0].fill_(1000), plain(x)[1])
    (failed,) = answer("during")
    assert "layer 1: an expert id is not in 0..7" in failed.error
    ffn.router = plain
    assert [output.token for output in answer("after")] == good
