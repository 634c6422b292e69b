"""The thread pool: every item exactly once, whoever does it, whatever happens beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from isthmus import native
from isthmus.native import _native

NOBODY = -1  # no slow worker
NEVER = -1  # no item throws
EVERYBODY = -1  # awake


def run(
    items: int,
    grain: int = 1,
    most: int = 0,
    *,
    slow_worker: int = NOBODY,
    item_us: int = 0,
    throw_at: int = NEVER,
) -> _native.PoolTrace:
    return _native.pool_trace(items, grain, most or grain, slow_worker, item_us, throw_at)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 7, 8, 16, 33, 64])
@pytest.mark.parametrize(
    ("items", "grain"), [(0, 1), (1, 1), (2, 1), (63, 1), (64, 5), (1000, 7), (1000, 2000)]
)
def test_every_item_is_done_once_in_ranges_of_at_most_grain(threads: int, items: int, grain: int) -> None:
    native.set_threads(threads)
    for _ in range(20):
        trace = run(items, grain)
        assert trace.visits == [1] * items
        assert max(trace.lengths, default=0) <= grain
        assert all(0 <= worker < threads for worker in trace.workers)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
@pytest.mark.parametrize(
    ("items", "least", "most"), [(1, 1, 50), (63, 1, 50), (1000, 2, 50), (1000, 7, 9), (5000, 1, 5000)]
)
def test_ranges_shrink_towards_the_end_within_their_bounds(
    threads: int, items: int, least: int, most: int
) -> None:
    native.set_threads(threads)
    for _ in range(20):
        trace = run(items, least, most)
        assert trace.visits == [1] * items
        assert max(trace.lengths) <= most
        # A worker's last range may be what is left of it: one for each of them, at most, is short.
        assert sum(length < least for length in trace.lengths) <= threads


def test_a_range_is_half_of_what_its_worker_has_left() -> None:
    native.set_threads(2)
    trace = run(128, 1, 1000)
    assert trace.visits == [1] * 128
    # Of 64 items each: 32, 16, 8, 4, 2, 1 and 1; two that look at once take more.
    assert sorted(trace.lengths)[-2:] == [32, 32]
    assert len(trace.lengths) <= 14
    assert min(trace.lengths) == 1


def test_a_thread_alone_takes_as_many_as_it_may() -> None:
    native.set_threads(1)
    assert run(1000, 1, 300).lengths == [300, 300, 300, 100]


def test_items_of_a_slow_worker_are_taken_by_another() -> None:
    native.set_threads(2)
    # The caller, worker 0, owns items 0..31 and sleeps 5 ms over each of them: worker 1 comes and helps.
    trace = run(64, slow_worker=0, item_us=5000)
    assert trace.visits == [1] * 64
    assert 1 in trace.workers[:32]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("threads", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("items", [[], [0], [7], [40, 0], [0, 13], [9, 1, 30], [5, 5, 5, 5], [0, 0, 0, 0, 3]])
def test_every_item_of_every_part_is_done_once(threads: int, nodes: int, items: list[int]) -> None:
    native.set_threads(threads, nodes)
    assert native.num_nodes() == min(threads, nodes)
    for grain in (1, 4, 100):
        taken = _native.pool_parts(items, grain, EVERYBODY)
        assert sorted((part, item) for part, item, _ in taken) == [
            (part, item) for part, count in enumerate(items) for item in range(count)
        ]
        assert all(0 <= worker < threads for _, _, worker in taken)


def test_who_has_nothing_left_helps_on_its_own_node_first() -> None:
    native.set_threads(4, 2)  # workers 0 and 1 on node 0, 2 and 3 on node 1; each owns four items
    taken = _native.pool_parts([8, 8], 1, awake := 2)  # the others hold their first item until the end
    mine = [(part, item) for part, item, worker in taken if worker == awake]
    on_node = [item for part, item in mine if part == 1]
    assert mine[: len(on_node)] == [(1, item) for item in on_node]  # everything of its node, then the rest
    assert on_node[:4] == [0, 1, 2, 3]  # its own first
    assert len(mine) >= 16 - 3


def test_an_exception_of_any_worker_reaches_the_caller_and_the_pool_lives_on() -> None:
    for threads in (1, 2, 5, 64):
        native.set_threads(threads)
        for throw_at in (0, 1, 499, 998, 999):
            with pytest.raises(RuntimeError, match=f"item {throw_at}$"):
                run(1000, 3, throw_at=throw_at)
            assert run(1000, 3).visits == [1] * 1000


def test_a_job_inside_a_job_runs_on_its_worker() -> None:
    for threads in (1, 2, 7):
        native.set_threads(threads)
        assert _native.pool_nested(50, 10) == 50 * 45


def test_scratch_is_private_to_a_worker_and_aligned() -> None:
    for threads in (1, 2, 7, 64):
        native.set_threads(threads)
        assert _native.pool_scratch(200, 64)
        assert _native.pool_scratch(200, 1 << 20)


def test_jobs_of_many_python_threads_run_one_after_the_other() -> None:
    native.set_threads(3)
    wrong: list[object] = []

    def caller(index: int) -> None:
        for turn in range(50):
            items = 100 + 10 * index + turn
            try:
                if run(items, 3).visits != [1] * items:
                    wrong.append((index, turn))
            except Exception as error:  # shown by the assertion below
                wrong.append(error)

    callers = [threading.Thread(target=caller, args=(index,)) for index in range(8)]
    for thread in callers:
        thread.start()
    for threads in (1, 4, 2, 64, 3):  # and the pool may change its size between their jobs
        native.set_threads(threads)
    for thread in callers:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.parametrize("threads", [0, -1, 1025, 100_000])
def test_an_absurd_number_of_threads_is_refused_and_changes_nothing(threads: int) -> None:
    native.set_threads(3)
    with pytest.raises(ValueError, match=f"threads must be 1 to 1024, got {threads}"):
        native.set_threads(threads)
    assert native.num_threads() == 3


def test_an_absurd_number_of_nodes_is_refused_and_changes_nothing() -> None:
    native.set_threads(3, 2)
    for nodes in (-1, 65):
        with pytest.raises(ValueError, match=f"nodes must be 0 to 64, got {nodes}"):
            native.set_threads(2, nodes)
    assert (native.num_threads(), native.num_nodes()) == (3, 2)


@pytest.mark.parametrize("threads", [2, 64])
def test_idle_threads_sleep(threads: int) -> None:
    native.set_threads(threads)
    run(1000)
    time.sleep(0.05)  # workers may watch for the next job for 0.1 ms, then sleep
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def test_a_forked_child_starts_its_own_threads() -> None:
    script = """
import os
from isthmus.native import _native
_native.set_threads(4, 2)
assert _native.pool_trace(100, 1, 1, -1, 0, -1).visits == [1] * 100
child = os.fork()
trace = _native.pool_trace(100, 1, 1, 0, 2000, -1)
assert trace.visits == [1] * 100 and any(trace.workers), trace.workers  # not the caller alone
assert _native.num_nodes() == 2
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=dict(os.environ))


def test_the_read_probe_reads_everything_at_least_once() -> None:
    native.set_threads(2)
    probe = native.ReadProbe(64 << 20)
    assert 0.1 < probe.run(0.0) < 10_000  # GB/s
    assert 0.1 < native.read_gb_s(8 << 20, 1, 0.01) < 10_000
    assert native.num_threads() == 2
    with pytest.raises(ValueError, match="at least 1048576 bytes, got 5"):
        native.ReadProbe(5)
