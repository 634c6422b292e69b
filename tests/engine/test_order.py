"""A layer first gives its routed experts to the CPU, computes its shared expert meanwhile, and then waits;
one device follows another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as GgmlType

from engine.stand_in import machine, run, runner_of, start
from isthmus.config import RunOptions
from isthmus.engine import loading
from isthmus.engine.engine import Engine
from isthmus.engine.graphs import DirectLane
from isthmus.engine.request import Request, SamplingParams
from isthmus.modules.on_gpu import experts, shared_experts
from isthmus.modules.split import SplitExperts as NativeSplit
from isthmus.native.handoff import Threaded
from isthmus.placement.machine import Machine
from models import tiny

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES["deepseek-v3"]
    folder = tmp_path_factory.mktemp("models")
    return tiny.write_case(folder / "tiny.gguf", case, tiny.build(case), tiny.matrices_as(GgmlType.Q8_0))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """submit, shared, wait: as they are called, from whatever is loaded from here on."""
    called: list[str] = []

    def noted(name: str, call: Any) -> Any:
        def noting(*args: Any, **options: Any) -> Any:
            called.append(name)
            return call(*args, **options)

        return noting

    for name in ("submit", "wait"):
        monkeypatch.setattr(Threaded, name, noted(name, getattr(Threaded, name)))
    for module in (experts, shared_experts):
        monkeypatch.setattr(module, "beside", noted("shared", module.beside))
    load = NativeSplit.load

    def loaded(self: Any, *args: Any) -> None:
        load(self, *args)
        self._shared = noted("shared", self._shared)

    monkeypatch.setattr(NativeSplit, "load", loaded)
    return called


@pytest.mark.parametrize("options", [{}, {"expert_cache": 1 << 16}, {"stream_rows": 40}], ids=str)
def test_on_a_device(
    path: Path, calls: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(path, monkeypatch, **options)
    calls.clear()
    run(engine, [PROMPT])
    engine.close()
    assert len(calls) >= 3 * 4
    assert calls == ["submit", "shared", "wait"] * (len(calls) // 3)


@pytest.mark.parametrize("options", [{}, {"expert_cache": 1 << 16}, {"stream_rows": 40}], ids=str)
def test_with_cpu_threads_in_its_place(
    path: Path, calls: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: machine())
    engine = Engine(path, RunOptions(device="cpu", strategy="hybrid", threads=2, **options))
    calls.clear()
    run(engine, [PROMPT])  # decodes are recorded: of the second one only what was recorded is run
    engine.close()
    assert len(calls) >= 3
    assert calls == ["submit", "shared", "wait"] * (len(calls) // 3)


def test_a_device_follows_the_one_before_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step, called, captured or replayed: x of the first is whole when the second one copies it."""
    followed: list[tuple[DirectLane, DirectLane]] = []

    class Following(DirectLane):
        def follow(self, other: Any) -> None:
            followed.append((self, other))

    monkeypatch.setattr(loading, "lane_of", lambda device, graphs: Following(device))
    engine = start(path, monkeypatch, gpus=2)
    first, second = (place.lane for place in runner_of(engine).places)
    followed.clear()
    engine.add(Request("0", PROMPT, SamplingParams(temperature=0.0, max_tokens=5)))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    engine.close()
    assert steps == 5  # a prompt, and four decodes, of which the first is captured
    assert followed == [(second, first)] * steps
