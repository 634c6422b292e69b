"""Recorded operators: run in order over the same memory, one record at a time, errors included."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from isthmus import native
from isthmus.native import rows


def norm(x: np.ndarray, out: np.ndarray) -> None:
    rows.rms_norm(x.ctypes.data, x.shape[0], x.shape[1], 0, 1e-6, out.ctypes.data)


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-6)


def test_a_program_runs_in_order_over_what_its_memory_holds_by_then() -> None:
    x, between, out = np.ones((3, 1, 32), np.float32)
    program = native.Program()
    with program.recording():
        norm(x, between)
        norm(between, out)
    assert len(program) == 2
    x[:] = np.random.default_rng(0).standard_normal(32) * 7
    between[:] = out[:] = 0
    program.run()
    np.testing.assert_allclose(between, normed(x), rtol=1e-5)
    np.testing.assert_allclose(out, normed(between), rtol=1e-5)


def test_a_thread_records_its_own_calls_only() -> None:
    x, mine, theirs = np.ones((3, 1, 8), np.float32)
    program = native.Program()
    with program.recording():
        thread = threading.Thread(target=norm, args=(x, theirs))
        thread.start()
        thread.join(timeout=20)
        norm(x, mine)
    norm(x, theirs)
    assert len(program) == 1


def test_one_record_at_a_time() -> None:
    program, other = native.Program(), native.Program()
    with program.recording():
        with pytest.raises(RuntimeError, match="records a program already"), other.recording():
            pass
        with pytest.raises(RuntimeError, match="cannot run while one is being recorded"):
            other.run()
        norm(*np.ones((2, 1, 8), np.float32))
    assert (len(program), len(other)) == (1, 0)


def test_an_operator_that_fails_ends_the_run_and_the_next_run_is_whole() -> None:
    """The second operator reads a block table that is changed between the runs."""
    caches = np.zeros((2, 1, 1, 64, 8), np.uint16)
    query, out = np.ones((2, 1, 8), np.float32)
    attention = rows.Attention(1, 1, 8, 1.0, kv_dtype="bf16")

    def indices(count: int) -> rows.PagedRows:
        zeros = np.zeros(count, np.int32)
        return rows.PagedRows(*[zeros.ctypes.data] * 4, count, num_sequences=1, max_blocks=1, num_blocks=1)

    step = indices(1)
    program = native.Program()
    with program.recording():
        attention(
            query.ctypes.data, 8, step, caches[0].ctypes.data, caches[1].ctypes.data, out.ctypes.data, 8
        )
    with pytest.raises(ValueError, match="2 rows cannot take the place of 1"):
        step.take([0, 0], [0, 0], [0, 0], [0], 1)
    out[:] = 1
    program.run()
    assert (out == 0).all()  # values of the empty cache


@pytest.mark.parametrize(
    ("taken", "error"),
    [
        (([0, 0], [0, 0], [0, 0], [0], 1), "2 rows cannot take the place of 1"),
        (([0], [0], [0, 1], [0], 1), "1 sequences and 2 slots for 1 rows"),
        (([0], [0], [0], [0, 0, 0], 2), "3 blocks are no tables of 2 sequences"),
        (([0], [0], [0], [], 0), "0 blocks are no tables of 0 sequences"),
        (([1], [0], [0], [0], 1), "row 0: sequence 1 is outside"),
        (([0], [64], [0], [0], 1), "row 0: position 64 is outside"),
        (([0], [0], [128], [0], 1), "row 0: slot 128 is outside"),
        (([0], [0], [0], [2], 1), "row 0: block of its sequence 2 is outside"),
    ],
)
def test_rows_that_lead_out_of_the_caches_are_not_taken(taken: Any, error: str) -> None:
    zero = np.zeros(1, np.int32).ctypes
    step = rows.PagedRows(*[zero.data] * 4, 1, num_sequences=1, max_blocks=1, num_blocks=2)
    with pytest.raises(ValueError, match=error):
        step.take(*taken)
    assert step.max_position == 0
    step.take([1], [70], [64 + 6], [0, 0, 0, 1], 2)
    assert (step.num_rows, step.max_position) == (1, 70)


def test_seconds_are_counted_by_kind() -> None:
    before = native.op_seconds()
    norm(*np.ones((2, 4, 4096), np.float32))
    spent = {kind: total - before[kind] for kind, total in native.op_seconds().items()}
    assert spent["norm"] > 0
    assert all(seconds == 0 for kind, seconds in spent.items() if kind != "norm")
    assert set(native.PRODUCTS) < set(spent)
