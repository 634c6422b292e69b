"""Copies beside computations, as torch.cuda is asked for them: its streams and events are taken down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from isthmus import native
from isthmus.formats.spec import by_name
from isthmus.modules.on_gpu.copies import NUM_BUFFERS, CopyStream
from isthmus.native import ops

EXPERTS, ROWS, COLUMNS = 6, 16, 32
DEVICE = torch.device("cpu")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.name = f"event {next(cuda.numbers)}"
        self.done = False

    def record(self, stream: FakeStream) -> None:
        self._cuda.log.append(f"{stream.name}: {self.name}")

    def synchronize(self) -> None:
        self._cuda.log.append(f"host waits for {self.name}")

    def query(self) -> bool:
        return self.done


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.log.append(f"{self.name} waits for {event.name}")


class FakeCuda:
    """The calls in their order; `copies` is the stream that was made, `computes` the one that is current."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.numbers = iter(range(1, 1000))
        self._current = FakeStream(self, "computes")
        self.events: list[FakeEvent] = []

    def Stream(self, device: torch.device) -> FakeStream:  # torch's name
        return FakeStream(self, "copies")

    def Event(self) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current

    def synchronize(self, device: torch.device) -> None:
        self.log.append("host waits for the device")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def copies(cuda: FakeCuda) -> CopyStream:
    return CopyStream(DEVICE, cuda=cuda, pinned=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


@pytest.fixture(scope="module")
def weight() -> native.PackedWeight:
    values = torch.arange(EXPERTS * ROWS * COLUMNS, dtype=torch.float32)
    return native.pack(values.numpy().tobytes(), by_name("f32").ggml_id, EXPERTS, ROWS, COLUMNS)


def expert(weight: native.PackedWeight, index: int) -> Tensor:
    one = weight.nbytes // EXPERTS
    return torch.frombuffer(bytearray(weight.tiles()), dtype=torch.uint8)[index * one : (index + 1) * one]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_tiles_arrive_and_the_host_waits_only_for_a_buffer_that_is_to_be_filled_again(
    cuda: FakeCuda, copies: CopyStream, weight: native.PackedWeight
) -> None:
    to = torch.zeros(EXPERTS, weight.nbytes // EXPERTS, dtype=torch.uint8)
    for index in range(EXPERTS):
        copies.copy(partial(ops.copy_expert, weight, index), to[index])
        assert torch.equal(to[index], expert(weight, index))
    waits = [line for line in cuda.log if line.startswith("host waits")]
    assert waits == [f"host waits for event {n}" for n in range(1, 1 + EXPERTS - NUM_BUFFERS)]
    assert cuda.log[:2] == ["on copies", "copies: event 1"]  # fetched, on the copies' own stream


def test_a_stage_is_computed_from_when_it_has_come_and_filled_again_when_that_is_done(
    cuda: FakeCuda, copies: CopyStream
) -> None:
    for _ in range(2):
        copies.before_copies(0)
        copies.after_copies(0)
        copies.before_use(0)
        copies.after_use(0)
    assert cuda.log == [
        "computes: event 1",
        "copies waits for event 1",  # fresh memory: not before what computed when it was made
        "copies: event 2",
        "computes waits for event 2",
        "computes: event 3",
        "copies waits for event 3",  # not before what computed from it
        "copies: event 4",
        "computes waits for event 4",
        "computes: event 5",
    ]


def test_stages_do_not_wait_for_each_other(cuda: FakeCuda, copies: CopyStream) -> None:
    for stage in (0, 1):
        copies.before_copies(stage)
        copies.after_copies(stage)
        copies.after_use(stage)
    cuda.log.clear()
    copies.before_copies(0)
    assert cuda.log == ["copies waits for event 3"]  # after the use of stage 0, not of 1


def test_a_copy_for_later_follows_what_computes_now_and_is_done_when_its_event_is(
    cuda: FakeCuda, copies: CopyStream, weight: native.PackedWeight
) -> None:
    go, to = threading.Event(), torch.zeros(weight.nbytes // EXPERTS, dtype=torch.uint8)

    def fill() -> None:
        assert go.wait(60)
        copies.copy(partial(ops.copy_expert, weight, 2), to)

    done = copies.later(fill)
    assert cuda.log == ["computes: event 1", "copies waits for event 1"]  # a step that reads the place
    assert not done()  # the host has not even filled the pinned memory
    go.set()
    wait_for(lambda: len(cuda.events) == 3)
    assert torch.equal(to, expert(weight, 2))
    assert not done()  # asked for, and under way
    cuda.events[-1].done = True
    wait_for(done)


def test_the_thread_that_copies_works_on_the_device_of_its_stream(cuda: FakeCuda) -> None:
    """A new thread's own is the first one, and so would its events be."""
    current: list[tuple[str, str]] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        current.append((str(which), threading.current_thread().name))
        yield
        current.pop()

    cuda.device = device  # type: ignore[method-assign]
    there = CopyStream(torch.device("cuda:1"), cuda=cuda, pinned=lambda nbytes: torch.empty(nbytes))
    seen: list[tuple[str, str]] = []
    done = there.later(lambda: seen.extend(current))
    wait_for(lambda: len(cuda.events) == 2)
    cuda.events[-1].done = True
    wait_for(done)
    assert seen == [("cuda:1", "isthmus-copies_0")]


def test_what_fails_while_copying_is_said_to_who_asks(copies: CopyStream) -> None:
    def fill() -> None:
        raise ValueError("the pinned memory is gone")

    done = copies.later(fill)
    with pytest.raises(ValueError, match="the pinned memory is gone"):
        wait_for(done)


def test_what_is_loaded_is_waited_for(cuda: FakeCuda, copies: CopyStream) -> None:
    copies.finish()
    assert cuda.log == ["host waits for the device"]
