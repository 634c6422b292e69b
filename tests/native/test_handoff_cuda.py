"""The driver is found, tried and used as it is: a fake one lacks, refuses and forgets things on demand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from handoff_kit import GUARD_S, HIDDEN, TOP_K, FakeCuda, Make, Rows, works

from isthmus.errors import HandoffError
from isthmus.native import handoff
from isthmus.native.handoff import HostFunc, StreamMemOps, on_stream

EXPERTS = 8
STREAM_KINDS = ("stream_memops", "host_func")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeCuda]:
    made = FakeCuda(tmp_path)
    yield made
    made.set(stuck_waits=0)  # lets the streams end that were left alone


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "PROBE_S", 0.05)


# -------------------------------------------------------------------------------------------- probe


def test_a_driver_that_has_everything_gives_stream_memory_operations(fake: FakeCuda) -> None:
    found = handoff.probe(driver=fake.path)
    assert found == handoff.Probe("stream_memops", "stream memory operations work", (12, 8))
    assert fake.outstanding == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"memops": 0}, "the device does not support them"),
        ({"version": 11060}, "they need CUDA 11.7, the driver supports 11.6"),
        ({"drop_writes": 1}, "a value that the stream wrote did not arrive"),
        ({"skip_waits": 1}, "the stream did not wait for a value"),
        ({"stuck_waits": 1}, "the stream did not see a value that the CPU wrote"),
        (
            {"no_captured_memops": 1},
            "in a captured graph cuStreamWriteValue64 failed: an unknown error (900)",
        ),
        ({"early_copies": 1}, "in a captured graph a copy did not wait for a value"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_without_working_memory_operations_host_functions_are_chosen(
    fake: FakeCuda, settings: dict[str, int], reason: str
) -> None:
    fake.set(**settings)
    found = handoff.probe(driver=fake.path)
    assert found.mechanism == "host_func"
    assert found.reason == f"no stream memory operations: {reason}"
    made, its = on_stream(HIDDEN, TOP_K, driver=fake.path)
    assert isinstance(made, HostFunc)
    assert its == found
    made.close()


@pytest.mark.parametrize(
    "call",
    [
        "cuStreamWaitValue64_v2",
        "cuMemAlloc_v2",
        "cuStreamBeginCapture_v2",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
    ],
)
def test_a_driver_call_that_fails_is_a_reason_too(fake: FakeCuda, call: str) -> None:
    fake.fail(call)
    found = handoff.probe(driver=fake.path)
    assert found.mechanism == "host_func"
    name = call.removesuffix("_v2").removesuffix("WithFlags")
    assert f"{name} failed: CUDA_ERROR_OUT_OF_MEMORY (2)" in found.reason
    assert fake.outstanding == 0


@pytest.mark.parametrize(
    ("without", "mechanism"),
    [
        (["MEMOPS"], "host_func"),
        (["GRAPHS"], "host_func"),
        (["HOST_FUNC"], "stream_memops"),
        (["MEMOPS", "HOST_FUNC"], "none"),
    ],
)
def test_functions_that_a_driver_lacks(tmp_path: Path, without: list[str], mechanism: str) -> None:
    fake = FakeCuda(tmp_path, *without)
    found = handoff.probe(driver=fake.path)
    assert found.mechanism == mechanism
    lacks = {"MEMOPS": StreamMemOps, "HOST_FUNC": HostFunc}
    for name in without:
        if name == "GRAPHS":
            assert "the driver has no graphs" in found.reason
            continue
        with pytest.raises(HandoffError, match="the driver has no "):
            lacks[name](HIDDEN, TOP_K, driver=fake.path)
    if mechanism != "none":
        return
    expected = (
        "CUDA device 0 cannot hand work to the CPU: no stream memory operations: the driver has no such "
        "function; no host functions: the driver has no such function"
    )
    with pytest.raises(HandoffError, match=expected):
        on_stream(HIDDEN, TOP_K, driver=fake.path)


@pytest.mark.usefixtures("impatient")
def test_host_functions_that_are_not_called(fake: FakeCuda) -> None:
    fake.set(memops=0, skip_host_funcs=1)
    found = handoff.probe(driver=fake.path)
    assert found.mechanism == "none"
    assert found.reason.endswith("no host functions: a host function was not called")


def test_no_driver_a_broken_one_an_old_one_no_device(tmp_path: Path, fake: FakeCuda) -> None:
    def reason(driver: str, device: int = 0) -> str:
        found = handoff.probe(device, driver)
        assert found.mechanism == "none"
        with pytest.raises(HandoffError, match="cannot hand work to the CPU"):
            on_stream(HIDDEN, TOP_K, device=device, driver=driver)
        return found.reason

    assert "no CUDA driver: /nowhere/libcuda.so.1: cannot open shared object" in reason(
        "/nowhere/libcuda.so.1"
    )
    (tmp_path / "text.so").write_text("no library")
    assert "no CUDA driver" in reason(str(tmp_path / "text.so"))
    assert "has no cuCtxPushCurrent_v2" in reason(FakeCuda(tmp_path, "CONTEXT").path)
    assert "there is no CUDA device 1; the driver has 1" in reason(fake.path, 1)
    assert "there is no CUDA device -1" in reason(fake.path, -1)
    fake.set(devices=0)
    assert "there is no CUDA device 0; the driver has 0" in reason(fake.path)
    fake.set(version=9020)
    assert "the driver supports CUDA 9.2, needed is 10.0; update it" in reason(fake.path)
    fake.set(version=12080, devices=1)
    for call in ("cuInit", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain"):
        fake.fail(call, 101)
        assert f"{call} failed: an unknown error (101)" in reason(fake.path)


# ------------------------------------------------------------------------------------- captured graphs


@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_a_captured_step_is_replayed_with_new_rows_each_time(kind: str, fake: FakeCuda, make: Make) -> None:
    side, layers = make(kind), 5
    for layer in range(layers):
        side.pretend(layer)
    slots = [side.handoff.register(layer, 2) for layer in range(layers)]
    batches = [Rows(2, EXPERTS, seed=layer) for layer in range(layers)]
    with fake.capture(side.stream) as graph:
        for slot, rows in zip(slots, batches, strict=True):
            side.submit(slot, rows)
            side.wait(slot, rows)
    assert side.handoff.counters().submits == 0  # nothing has run
    for replay in range(20):
        for layer, rows in enumerate(batches):
            fresh = Rows(2, EXPERTS, seed=1000 * replay + layer)
            rows.x[:], rows.ids[:], rows.weights[:], rows.y[:] = fresh.x, fresh.ids, fresh.weights, np.nan
        fake.launch(graph, side.stream)
        side.finish()
        for rows in batches:
            assert np.array_equal(rows.y, rows.pretended_y())
    counters = side.handoff.counters()
    assert (counters.submits, counters.waits) == (20 * layers, 20 * layers)
    assert counters.bytes_x == 20 * layers * 2 * HIDDEN * 4
    fake.free_graph(graph)


@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_replays_may_be_enqueued_ahead(kind: str, fake: FakeCuda, make: Make) -> None:
    side = make(kind)
    side.pretend(0, sleep_s=0.001)
    slot, rows = side.handoff.register(0, 2), Rows(2, EXPERTS)
    with fake.capture(side.stream) as graph:
        side.submit(slot, rows)
        side.wait(slot, rows)
    for _ in range(30):
        fake.launch(graph, side.stream)
    side.finish()
    assert np.array_equal(rows.y, rows.pretended_y())
    assert side.handoff.counters().waits == 30
    fake.free_graph(graph)


@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_a_replay_that_fails_or_is_late_is_told_and_the_next_one_is_right(
    kind: str, fake: FakeCuda, make: Make
) -> None:
    side = make(kind, timeout_s=0.15)
    slots = [side.handoff.register(layer, 2) for layer in range(3)]
    batches = [Rows(2, EXPERTS, seed=slot.layer) for slot in slots]
    for slot in slots:
        side.pretend(slot.layer)
    with fake.capture(side.stream) as graph:
        for slot, rows in zip(slots, batches, strict=True):
            side.submit(slot, rows)
            side.wait(slot, rows)

    def replay() -> None:
        fake.launch(graph, side.stream)
        side.finish()

    replay()
    side.pretend(1, error="boom")
    with pytest.raises(HandoffError, match=r"layer 1 \(slot 1, 2 rows\): boom$"):
        replay()
    side.pretend(1, sleep_s=0.3)
    with pytest.raises(HandoffError, match=r"layer 1 \(slot 1, 2 rows\): no result within 150 ms"):
        replay()
    time.sleep(0.3)
    side.pretend(1)
    for rows in batches:
        rows.y[:] = np.nan
    replay()
    for rows in batches:
        assert np.array_equal(rows.y, rows.pretended_y())
    fake.free_graph(graph)


@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_a_capture_that_was_given_up_leaves_nothing_to_wait_for(
    kind: str, fake: FakeCuda, make: Make
) -> None:
    side = make(kind)
    side.pretend(0)
    slot = side.handoff.register(0, 2)
    with fake.capture(side.stream) as graph:
        side.submit(slot, Rows(2, EXPERTS))  # and then something failed
    fake.free_graph(graph)
    side.handoff.abandon()
    works(side, slot)


@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_nothing_is_allocated_in_submit_and_wait(kind: str, fake: FakeCuda, make: Make) -> None:
    side = make(kind)
    side.pretend(0)
    slot = side.handoff.register(0, 2)
    fake.fail("cuMemHostAlloc")
    works(side, slot)
    with pytest.raises(HandoffError, match=r"cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        side.handoff.register(1, 2)
    works(side, slot)


@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_submit_and_wait_are_few_operations_and_no_more(kind: str, fake: FakeCuda, make: Make) -> None:
    side = make(kind)
    side.pretend(0)
    slot, rows = side.handoff.register(0, 2), Rows(2, EXPERTS)
    signals = 3 if kind == "stream_memops" else 2  # write done and ready, wait; or two calls
    with fake.capture(side.stream) as graph:
        side.submit(slot, rows)
        side.wait(slot, rows)
    assert fake.operations(graph) == signals + 4  # x, ids, weights, y
    fake.free_graph(graph)
    with fake.capture(side.stream) as graph:  # kernels write into the slot and read from it
        side.handoff.submit(slot, 2, 0, 0, 0, stream=side.stream)
        side.handoff.wait(slot, 0, stream=side.stream)
    assert fake.operations(graph) == signals
    fake.free_graph(graph)


# --------------------------------------------------------------------------------------- in a step


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("stream_memops", "cuStreamWriteValue64_v2"),
        ("stream_memops", "cuStreamWaitValue64_v2"),
        ("host_func", "cuLaunchHostFunc"),
        ("stream_memops", "cuMemcpyAsync"),
        ("host_func", "cuMemcpyAsync"),
        ("host_func", "cuCtxPushCurrent_v2"),
    ],
)
def test_a_driver_call_that_fails_in_a_step_is_an_error_of_that_step(
    kind: str, call: str, fake: FakeCuda, make: Make
) -> None:
    side = make(kind)
    side.pretend(0)
    slot = side.handoff.register(0, 2)
    fake.fail(call)
    with pytest.raises(HandoffError, match=rf"{call.removesuffix('_v2')} failed: CUDA_ERROR_OUT_OF_MEMORY"):
        side.run(slot, Rows(2, EXPERTS))
    fake.fail("")
    side.handoff.abandon()
    works(side, slot)


@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_two_streams_and_two_hand_offs_do_not_block_each_other(kind: str, make: Make) -> None:
    one, two = make(kind), make(kind)
    for side in (one, two):
        side.pretend(0, sleep_s=0.002)
    slots = [side.handoff.register(0, 2) for side in (one, two)]
    batches = [[Rows(2, EXPERTS, seed=10 * step + i) for i in range(2)] for step in range(10)]
    for pair in batches:  # everything is enqueued before anything is waited for
        for side, slot, rows in zip((one, two), slots, pair, strict=True):
            side.submit(slot, rows)
            side.wait(slot, rows)
    for side in (one, two):
        side.finish()
    for rows in (rows for pair in batches for rows in pair):
        assert np.array_equal(rows.y, rows.pretended_y())


def test_a_graph_replayed_after_the_hand_off_was_closed_calls_nobody(fake: FakeCuda, make: Make) -> None:
    side = make("host_func")
    side.pretend(0)
    slot, rows = side.handoff.register(0, 2), Rows(2, EXPERTS)
    with fake.capture(side.stream) as graph:
        side.submit(slot, rows)
        side.wait(slot, rows)
    side.handoff.close()
    began = time.monotonic()
    fake.launch(graph, side.stream)
    fake.synchronize(side.stream)
    assert time.monotonic() - began < GUARD_S
    fake.free_graph(graph)


def test_polling_becomes_rare_when_nothing_comes(make: Make) -> None:
    side = make("stream_memops")
    side.pretend(0)
    slot = side.handoff.register(0, 2)
    works(side, slot)
    time.sleep(0.1)  # it polls for 20 ms, then naps for an eighth of the time that has passed
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.06
    works(side, slot)
