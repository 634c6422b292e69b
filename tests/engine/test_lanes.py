"""How work is captured on a CUDA stream, seen from a torch that only writes down what it is asked; and what a
decode is filled up with."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from isthmus.config import BLOCK_TOKENS, MAX_CAPTURED_ROWS
from isthmus.engine import graphs
from isthmus.engine.batch import Batch
from isthmus.engine.graphs import CudaLane, DirectLane, lane_of
from isthmus.engine.padding import bucket_of, each_its_own, padded
from isthmus.errors import HandoffError


class FakeCuda:
    """The calls that a lane makes, in order; `capturing` while a graph is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.capturing = self.broken_off = False
        cuda = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.device = device

            def synchronize(self) -> None:
                assert not cuda.capturing, "a stream that is captured cannot be waited for"
                cuda.calls.append("synchronize")

            def wait_stream(self, other: Stream) -> None:
                cuda.calls.append(("wait", str(self.device), str(other.device)))

        class Event:
            """Done 2.5 ms of the device after the one before it."""

            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self, stream: Stream) -> None:
                self.at = 2.5 * sum(call[0] == "event" for call in cuda.calls)
                cuda.calls.append(("event", str(stream.device)))

            def elapsed_time(self, later: Event) -> float:
                return later.at - self.at

        class Graph:
            def replay(self) -> None:
                assert not cuda.capturing
                cuda.calls.append("replay")

        @contextmanager
        def graph(made: Graph, **settings: Any) -> Iterator[None]:
            cuda.calls.append(("capture", settings["pool"], settings["capture_error_mode"]))
            cuda.capturing = True
            try:
                yield
            except BaseException:
                if cuda.broken_off:  # as what CUDA does not allow there leaves it
                    raise RuntimeError("operation failed due to a previous error during capture") from None
                raise
            finally:
                cuda.capturing = False

        @contextmanager
        def current(what: Any) -> Iterator[None]:
            cuda.calls.append(("on", str(getattr(what, "device", what))))
            yield

        for name, fake in {
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": graph,
            "graph_pool_handle": lambda: "pool",
            "device": current,
            "stream": current,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)


GPU = torch.device("cuda:0")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_function_runs_before_it_is_captured_and_its_graph_once_after(cuda: FakeCuda) -> None:
    """The first run compiles and registers what may not be during capture; a capture computes nothing."""
    lane, runs = lane_of(GPU), []
    assert isinstance(lane, CudaLane)
    with lane.here():
        replay = lane.capture(lambda: runs.append(cuda.capturing))
    assert runs == [False, True]
    assert cuda.calls[2:] == ["synchronize", ("capture", "pool", "thread_local"), "replay"]
    replay()
    assert cuda.calls[-1] == "replay"
    assert len(runs) == 2


def test_buckets_share_the_memory_of_one_pool(cuda: FakeCuda) -> None:
    lane = lane_of(GPU)
    for _ in range(2):
        lane.capture(lambda: None)
    captures = [call for call in cuda.calls if call[0] == "capture"]
    assert captures == [("capture", "pool", "thread_local")] * 2


def test_without_graphs_the_function_is_called_each_time(cuda: FakeCuda) -> None:
    runs: list[int] = []
    replay = lane_of(GPU, graphs=False).capture(lambda: runs.append(1))
    replay()
    assert len(runs) == 2
    assert "replay" not in cuda.calls


def test_a_capture_that_fails_leaves_the_lane_as_it_was(cuda: FakeCuda) -> None:
    lane = lane_of(GPU)

    def run() -> None:
        if cuda.capturing:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        lane.capture(run)
    lane.capture(lambda: None)()
    assert cuda.calls[-2:] == ["replay", "replay"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), HandoffError("cuStream..")])
def test_what_broke_a_capture_off_is_said_and_not_that_it_did_not_end(
    cuda: FakeCuda, error: Exception
) -> None:
    def run() -> None:
        if cuda.capturing:
            raise error

    cuda.broken_off = True
    with pytest.raises(type(error)) as raised:
        lane_of(GPU).capture(run)
    assert raised.value is error
    assert "previous error during capture" in str(raised.value.__cause__)


def test_nothing_is_collected_during_a_capture(cuda: FakeCuda) -> None:
    """What stands in a cycle may hold pinned memory, whose end would be recorded."""
    seen: list[bool] = []
    lane_of(GPU).capture(lambda: seen.append(gc.isenabled()))
    assert seen == [True, False]
    assert gc.isenabled()


def test_a_lane_waits_for_the_one_before_it(cuda: FakeCuda) -> None:
    first, second = lane_of(GPU), lane_of(torch.device("cuda:1"))
    second.follow(first)
    assert cuda.calls == [("wait", "cuda:1", "cuda:0")]
    second.follow(DirectLane(torch.device("cpu")))
    assert len(cuda.calls) == 1


def test_work_is_queued_on_the_lanes_own_device_and_stream(cuda: FakeCuda) -> None:
    with lane_of(torch.device("cuda:1")).here():
        assert cuda.calls == [("on", "cuda:1"), ("on", "cuda:1")]


def test_events_say_when_work_was_done_on_the_hosts_clock(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs.time, "monotonic_ns", lambda: 7_000_000_000)
    clock = lane_of(torch.device("cuda:1")).clock()
    for _ in range(3):
        clock.mark()
    assert cuda.calls == ["synchronize", *[("event", "cuda:1")] * 4]  # the first on an idle stream
    assert clock.times_ns() == [7_002_500_000, 7_005_000_000, 7_007_500_000]


# ------------------------------------------------------------------------------------------ padding


def test_buckets_are_powers_of_two() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 4, 5, 8, 9, 17, MAX_CAPTURED_ROWS)] == [
        1,
        2,
        4,
        4,
        8,
        8,
        16,
        32,
        32,
    ]


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_places_left_over_repeat_rows_and_write_to_the_spare_block() -> None:
    """Three sequences in places for four, two blocks each; the spare one is number 9."""
    batch = Batch(
        tokens=rows(7, 8, 9),
        positions=rows(65, 3, 64),
        sequences=rows(0, 1, 2),
        slots=rows(2 * BLOCK_TOKENS + 1, BLOCK_TOKENS + 3, 5 * BLOCK_TOKENS),
        block_tables=torch.tensor([[0, 2], [1, 0], [4, 5]], dtype=torch.int32),
        logit_rows=rows(0, 1, 2),
    )
    full = padded(batch, 8, spare_block=9)
    assert full.tokens.tolist() == [7, 8, 9, 7, 8, 9, 7, 8]
    assert full.positions.tolist() == [65, 3, 64, 65, 3, 64, 65, 3]
    assert full.block_tables[3:6].equal(batch.block_tables)
    assert full.slots[:3].equal(batch.slots)
    spare = full.slots[3:]
    assert (spare // BLOCK_TOKENS == 9).all()
    assert len(spare.unique()) == 5  # a place for each
    assert full.sequences.tolist() == full.logit_rows.tolist() == list(range(8))
    assert full.is_decode
    full.prepare(vocab_size=10, num_blocks=10)
    assert padded(batch, 3, spare_block=9) is batch


def test_rows_of_a_draft_are_a_decode_of_as_many_sequences() -> None:
    """Two sequences, the first with two guesses: a line of tables for each row, and no other change."""
    batch = Batch(
        tokens=rows(7, 8, 9, 4),
        positions=rows(63, 64, 65, 3),
        sequences=rows(0, 0, 0, 1),
        slots=rows(63, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, BLOCK_TOKENS + 3),
        block_tables=torch.tensor([[0, 2], [1, 0]], dtype=torch.int32),
        logit_rows=rows(0, 1, 2, 3),
        sampled=rows(1, 1, 1, 0),
    )
    made = each_its_own(batch)
    assert not batch.is_decode
    assert made.is_decode
    assert made.sequences.tolist() == [0, 1, 2, 3]
    assert made.block_tables.tolist() == [[0, 2], [0, 2], [0, 2], [1, 0]]
    for name in ("tokens", "positions", "slots", "logit_rows", "sampled"):
        assert getattr(made, name) is getattr(batch, name)
    assert each_its_own(made) is made
