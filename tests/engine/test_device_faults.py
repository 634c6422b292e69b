"""What goes wrong on devices ends the step it happens in, by name; the next one works."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.stand_in import CPU, answers, machine, run, runner_of, start
from isthmus.config import RunOptions
from isthmus.engine import loading
from isthmus.engine.engine import Engine
from isthmus.engine.request import Request, SamplingParams
from isthmus.errors import HandoffError, NotEnoughMemoryError
from isthmus.modules import split
from isthmus.native.handoff import Threaded
from isthmus.placement.machine import Machine
from models import tiny

PROMPT = [1, 2, 3, 4, 5]
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nSee documentation")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES["qwen3moe"]
    return tiny.write_case(tmp_path_factory.mktemp("models") / "tiny.gguf", case, tiny.build(case))


@pytest.fixture
def engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = start(path, monkeypatch)
    yield made
    made.close()


def last_layer(engine: Engine) -> Any:
    return runner_of(engine).model.layers[-1]


def out_of_memory(engine: Engine) -> Callable[[], None]:
    """In the middle of a step, after a layer has submitted to the CPU and before it waits."""
    experts = last_layer(engine).ffn.experts
    wait = experts._wait
    experts._wait = lambda *args, **kwargs: (_ for _ in ()).throw(FULL)
    return lambda: setattr(experts, "_wait", wait)


def spoilt_router(engine: Engine, spoil: Callable[[Any, Any], Any]) -> Callable[[], None]:
    ffn = last_layer(engine).ffn
    router = ffn.router
    ffn.router = lambda x: spoil(*router(x))
    return lambda: setattr(ffn, "router", router)


def nan_weights(engine: Engine) -> Callable[[], None]:
    return spoilt_router(engine, lambda ids, weights: (ids, weights.fill_(float("nan"))))


def no_such_expert(engine: Engine) -> Callable[[], None]:
    return spoilt_router(engine, lambda ids, weights: (ids.fill_(1000), weights))


def failing_worker(engine: Engine) -> Callable[[], None]:
    return pretended(engine, error="the experts are out")


def pretended(engine: Engine, *, sleep_us: int = 0, error: str = "") -> Callable[[], None]:
    """The CPU's side of the last layer does this instead of its experts."""
    layer = len(runner_of(engine).model.layers) - 1
    handoff: Any = engine._handoffs.each[0]
    experts = handoff.set_by_layer[layer]
    handoff._native.set_pretended(layer, sleep_us, error)
    return lambda: handoff.set_experts(layer, experts)


class Remembering(Threaded):
    """Keeps the experts it was given, so that a test can put them back."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.set_by_layer: dict[int, Any] = {}

    def set_experts(self, layer: int, experts: Any) -> None:
        self.set_by_layer[layer] = experts
        super().set_experts(layer, experts)


@pytest.fixture(autouse=True)
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(split.HANDOFFS, "threaded", Remembering)


NO_MEMORY = (
    r"EngineError: a step of \d rows found no memory left on its device \(CUDA out of memory\. Tried to "
    r"allocate 20\.00 MiB\.\); load the model with a smaller --chunk"
)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (out_of_memory, NO_MEMORY),
        (nan_weights, "HandoffError: hand-off of layer 1 .* not finite"),
        (no_such_expert, "HandoffError: hand-off of layer 1 .* 1000"),
        (failing_worker, "HandoffError: hand-off of layer 1 .* the experts are out"),
    ],
)
@pytest.mark.parametrize("during", ["prefill", "decode"])
def test_a_fault_ends_its_step_by_name_and_the_next_one_works(
    engine: Engine, spoil: Callable[[Engine], Callable[[], None]], says: str, during: str
) -> None:
    """The decode is one that was captured before."""
    good = answers(engine, [PROMPT])
    engine.add(Request("spoilt", PROMPT, SamplingParams(temperature=0.0, max_tokens=4)))
    if during == "decode":
        assert [output.error for output in engine.step()] == [None]
    mend = spoil(engine)
    (failed,) = engine.step()
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert re.search(says, failed.error), failed.error
    mend()
    assert answers(engine, [PROMPT]) == good


def test_a_time_out_ends_its_step_and_the_next_one_works(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(split.HANDOFFS, "threaded", partial(Remembering, timeout_s=1.0))
    engine = start(path, monkeypatch)
    good = answers(engine, [PROMPT])
    # Slow enough that from here on the coordinator computes, not the waiting thread, which would see no time.
    pretended(engine, sleep_us=150_000)
    run(engine, [PROMPT])
    mend = pretended(engine, sleep_us=1_500_000)
    (failed,) = run(engine, [PROMPT])
    assert failed.error is not None
    assert re.search("HandoffError: hand-off of layer 1 .* no result within 1000 ms", failed.error), (
        failed.error
    )
    mend()
    assert answers(engine, [PROMPT]) == good
    engine.close()


def test_what_failed_on_the_cpu_beside_a_stream_ends_its_step_and_the_next_one_works(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a stream nobody waits on the host, so it is `check` that says it, when the step is done."""
    good = answers(engine, [PROMPT])
    handoff: Any = engine._handoffs.each[0]
    check, left = handoff.check, ["hand-off of layer 1 (slot 2, 5 rows): boom"]

    def once() -> None:
        check()
        if left:
            raise HandoffError(left.pop())

    monkeypatch.setattr(handoff, "check", once)
    (failed,) = run(engine, [PROMPT])
    assert failed.error is not None
    assert "HandoffError: hand-off of layer 1 (slot 2, 5 rows): boom" in failed.error
    assert answers(engine, [PROMPT]) == good


def full_while_loading(monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """The first `times` models find no memory on their device."""
    load_model, left = loading.load_model, [times]

    def load(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise FULL
        return load_model(*args, **kwargs)

    monkeypatch.setattr(loading, "load_model", load)


def test_a_gpu_that_is_full_at_load_is_an_error_with_the_numbers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_while_loading(monkeypatch, times=1)
    said = (
        r"a GPU's memory was full while the model was loaded \(CUDA out of memory\. Tried to allocate 20\.00 "
        r"MiB\.\); the plan takes cuda:0 \d\.\d of 23\.0 GiB: end what else uses the GPU"
    )
    with pytest.raises(NotEnoughMemoryError, match=said) as raised:
        start(path, monkeypatch)
    assert 0 < raised.value.need_bytes < raised.value.have_bytes


def test_a_full_gpu_nobody_asked_for_leaves_the_cpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full_while_loading(monkeypatch, times=1)
    monkeypatch.setattr(Machine, "detect", machine)
    with caplog.at_level(logging.WARNING):
        engine = Engine(path, RunOptions(threads=2), stand_ins={"cuda:0": CPU})
    assert engine.info.strategy == engine.plan.strategy == "cpu"
    assert engine.info.devices == {}
    assert any("running on the CPU: a GPU's memory was full" in message for message in caplog.messages)
    assert len(answers(engine, [PROMPT])[0]) == 4
    engine.close()


def test_a_gpu_whose_cache_does_not_fit_is_full_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise FULL

    monkeypatch.setattr(loading, "State", no_room)
    with pytest.raises(NotEnoughMemoryError, match="full while the model was loaded"):
        start(path, monkeypatch)
