"""Steps that run again as one call, and where the time of operators goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from isthmus.native import _native

op_seconds = _native.op_seconds  # {kind of operator: seconds in its calls, all of this process}

# (events) -> the calls kept so far, [(kind, begin_ns, end_ns)] in monotonic time; keeps the next so many.
keep_op_log = _native.keep_op_log

PRODUCTS = ("linear", "head_linear", "experts")  # the kinds that read weights


class Program:
    """Operators in the order in which one thread ran them, to run again over the same memory.

    As a CUDA graph it holds addresses: operators and memory must outlive it, and what differs from run to run
    (tokens, the indices of PagedRows) is changed in place. Each call is checked again whenever it runs.
    """

    def __init__(self) -> None:
        self._program = _native.Program()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, what this thread calls is run and recorded. RuntimeError if it records already."""
        self._program.begin()
        try:
            yield
        finally:
            self._program.end()

    def run(self) -> None:
        """All of it, without the interpreter; an operator's error is raised here and ends the run."""
        self._program.run()

    def __len__(self) -> int:
        """Operators recorded."""
        return len(self._program)
