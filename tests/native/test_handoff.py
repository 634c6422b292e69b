"""The hand-off gives what the experts operator gives, bit for bit, whoever computes it."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from handoff_kit import HIDDEN, KINDS, TOP_K, Make, Rows, Side
from random_weights import random_weight

from isthmus import native

EXPERTS, FFN, LAYERS, MAX_ROWS = 12, 128, 3, 20


@pytest.fixture(scope="module")
def layers() -> list[native.Experts]:
    """Experts of three layers, all different; Q4_K and Q8_0 weights."""

    def weight(name: str, rows: int, columns: int, seed: int) -> native.PackedWeight:
        return random_weight(name, EXPERTS, rows, columns, seed).packed

    return [
        native.Experts(
            weight("q4_k", FFN, HIDDEN, 3 * layer + 1),
            weight("q4_k", FFN, HIDDEN, 3 * layer + 2),
            weight("q8_0", HIDDEN, FFN, 3 * layer + 3),
        )
        for layer in range(LAYERS)
    ]


def direct(experts: native.Experts, rows: Rows) -> np.ndarray:
    y = np.full_like(rows.x, np.nan)
    inputs = (rows.x.ctypes.data, len(rows), rows.ids.ctypes.data, rows.weights.ctypes.data, TOP_K)
    experts(*inputs, 0, y.ctypes.data)
    return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_equal_to_the_operator_bit_for_bit(kind: str, threads: int, make: Make, layers) -> None:
    native.set_threads(threads)
    side = make(kind)
    for layer, experts in enumerate(layers):
        side.handoff.set_experts(layer, experts)
    slots = [side.handoff.register(layer, MAX_ROWS) for layer in range(LAYERS)]
    for count in (0, 1, 3, 7, MAX_ROWS):  # below and above the switch from GEMV to GEMM
        for slot, experts in zip(slots, layers, strict=True):
            rows = Rows(count, EXPERTS, seed=count)
            assert side.run(slot, rows).tobytes() == direct(experts, rows).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_many_layers_and_steps_each_with_rows_of_its_own(kind: str, make: Make) -> None:
    side, layers, steps = make(kind), 58, 20
    for layer in range(layers):
        side.pretend(layer)
    slots = [side.handoff.register(layer, 2) for layer in range(layers)]
    for step in range(steps):
        for slot in slots:
            rows = Rows(1 + step % 2, EXPERTS, seed=step * layers + slot.layer)
            assert np.array_equal(side.run(slot, rows), rows.pretended_y())
    counters = side.handoff.counters()
    assert (counters.submits, counters.waits, counters.failures) == (layers * steps, layers * steps, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_all_layers_may_be_under_way_at_once(kind: str, make: Make) -> None:
    side, layers = make(kind), 40
    slots = [side.handoff.register(layer, 4) for layer in range(layers)]
    for slot in slots:
        side.pretend(slot.layer, sleep_s=0.0002)
    batches = [Rows(1 + slot.layer % 4, EXPERTS, seed=slot.layer) for slot in slots]
    for slot, rows in zip(slots, batches, strict=True):
        side.submit(slot, rows)
    for slot, rows in reversed(list(zip(slots, batches, strict=True))):
        side.wait(slot, rows)
    side.finish()
    for rows in batches:
        assert np.array_equal(rows.y, rows.pretended_y())


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_of_two_slots_serves_all_layers(kind: str, make: Make) -> None:
    side, layers = make(kind), 9
    for layer in range(layers):
        side.pretend(layer)
    ring = side.handoff.register_ring(64)
    before = None  # of two, one is filled while the other is computed
    batches = [Rows(64 - layer, EXPERTS, seed=layer) for layer in range(layers)]
    for layer, rows in enumerate(batches):
        slot = ring.take(layer)
        side.submit(slot, rows)
        if before:
            side.wait(*before)
        before = (slot, rows)
    side.wait(*before)
    side.finish()
    for rows in batches:
        assert np.array_equal(rows.y, rows.pretended_y())


@pytest.mark.parametrize("kind", KINDS)
def test_the_caller_may_overwrite_its_rows_after_submit(kind: str, make: Make) -> None:
    side = make(kind)
    side.pretend(0, sleep_s=0.005)
    slot, rows = side.handoff.register(0, 4), Rows(4, EXPERTS)
    expected = rows.pretended_y()
    side.submit(slot, rows)
    if side.stream:  # in the stream's order
        side.wait(slot, rows)
        side.finish()
    rows.x[:], rows.ids[:], rows.weights[:] = 7, -1, 9
    if not side.stream:
        side.wait(slot, rows)
    assert np.array_equal(rows.y, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_written_into_the_slot_and_read_there(kind: str, make: Make) -> None:
    side = make(kind)
    side.pretend(0)
    slot, rows = side.handoff.register(0, 5), Rows(3, EXPERTS)
    for address, array in zip(slot.host, (rows.x, rows.ids, rows.weights), strict=False):
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
    side.handoff.submit(slot, 3, 0, 0, 0, stream=side.stream)
    side.handoff.wait(slot, 0, stream=side.stream)
    side.finish()
    y = np.ctypeslib.as_array((ctypes.c_float * (3 * HIDDEN)).from_address(slot.host.y)).reshape(3, HIDDEN)
    assert np.array_equal(y, rows.pretended_y())


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_rows_are_summed_in_fp32_and_rounded_once(kind: str, make: Make, layers) -> None:
    torch = pytest.importorskip("torch")
    side = make(kind, dtype="bf16")
    side.handoff.set_experts(0, layers[0])
    slot, rows = side.handoff.register(0, 8), Rows(8, EXPERTS)
    x = torch.from_numpy(rows.x).bfloat16()
    y = torch.full_like(x, float("nan"))
    addresses = (x.data_ptr(), rows.ids.ctypes.data, rows.weights.ctypes.data)
    side.handoff.submit(slot, 8, *addresses, stream=side.stream)
    side.handoff.wait(slot, y.data_ptr(), stream=side.stream)
    side.finish()
    rows.x = x.float().numpy()
    assert torch.equal(y, torch.from_numpy(direct(layers[0], rows)).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_counters_are_those_of_the_rows_that_crossed(kind: str, make: Make) -> None:
    side = make(kind)
    side.pretend(0, sleep_s=0.01)
    slot = side.handoff.register(0, 8)
    for count in (5, 0, 2):
        side.run(slot, Rows(count, EXPERTS))
    counters = side.handoff.counters()
    assert (counters.submits, counters.waits, counters.failures) == (3, 3, 0)
    assert counters.bytes_x == counters.bytes_y == 7 * HIDDEN * 4
    assert counters.bytes_routing == 7 * TOP_K * (4 + 4)
    assert 0.02 <= counters.experts_s < 10  # two calls with rows
    seen = kind in ("threaded", "host_func")
    assert counters.waiting_s >= 0.015 if seen else counters.waiting_s == 0


@pytest.mark.parametrize("kind", KINDS)
def test_events_tell_what_happened_in_order(kind: str, make: Make) -> None:
    side = make(kind, events=7)
    for layer in range(3):
        side.pretend(layer, sleep_s=0.002)
    slots = [side.handoff.register(layer, 1) for layer in range(3)]
    for slot in slots:
        side.run(slot, Rows(1, EXPERTS))
    events = side.handoff.take_events()
    assert len(events) == (3 if kind == "stream_memops" else 7)  # of 9 or 12 the last 7 were kept
    assert all(event.begin_ns <= event.end_ns for event in events)
    experts = [event for event in events if event.phase == "experts"]
    assert [event.layer for event in experts][-2:] == [1, 2]
    assert all(event.end_ns - event.begin_ns >= 2_000_000 for event in experts)
    assert all(event.slot == slots[event.layer].index for event in events)
    if kind == "threaded":
        assert {event.phase for event in events} == {"submit", "queue", "experts", "wait"}
    assert side.handoff.take_events() == []


def test_hand_offs_of_many_threads_at_once_on_more_threads_than_cores(make: Make, layers) -> None:
    native.set_threads(8)
    all_sides = [make(kind) for kind in KINDS * 2]
    wrong: list[object] = []

    def engine(side: Side, seed: int) -> None:
        try:
            side.handoff.set_experts(0, layers[seed % LAYERS])
            slot = side.handoff.register(0, 4)
            for step in range(10):
                rows = Rows(1 + step % 4, EXPERTS, seed=100 * seed + step)
                if side.run(slot, rows).tobytes() != direct(layers[seed % LAYERS], rows).tobytes():
                    wrong.append((side.kind, step))
        except Exception as error:  # shown by the assertion below
            wrong.append(error)

    threads = [threading.Thread(target=engine, args=(side, i)) for i, side in enumerate(all_sides)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
