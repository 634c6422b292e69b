"""The four hand-offs behind one bench: host memory, or a stream of the fake driver with its settings."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from isthmus.native.handoff import Handoff, HostFunc, Inline, Slot, StreamMemOps, Threaded

KINDS = ("inline", "threaded", "stream_memops", "host_func")
HIDDEN, TOP_K = 256, 3
GUARD_S = 20.0


class FakeCuda:
    """fake_cuda.c, compiled; every instance is a library, and so a state, of its own."""

    def __init__(self, folder: Path, *without: str) -> None:
        self.path = str(folder / f"fake_cuda_{time.monotonic_ns()}.so")
        source = Path(__file__).with_name("fake_cuda.c")
        flags = [f"-DWITHOUT_{name}" for name in without]
        compiler = os.environ.get("CC", "cc")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-pthread", "-Wall", "-Werror", *flags, source, "-o", self.path],
            check=True,
        )
        self.lib = ctypes.CDLL(self.path)
        self.lib.fake_begin_capture.restype = ctypes.c_void_p

    def set(self, **settings: int) -> None:
        for name, value in settings.items():
            self.lib.fake_set(name.encode(), value)

    def fail(self, call: str, code: int = 2) -> None:
        """`call` returns `code` (2: out of memory) from now on; "" ends it."""
        self.lib.fake_fail(call.encode(), code)

    @property
    def outstanding(self) -> int:
        """Pinned allocations that were not freed."""
        return self.lib.fake_outstanding()

    def new_stream(self) -> int:
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self.lib.cuCtxPushCurrent_v2(context)
        assert self.lib.cuStreamCreate(ctypes.byref(stream), 1) == 0
        self.lib.cuCtxPopCurrent_v2(ctypes.byref(context))
        assert stream.value
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        self.lib.cuStreamDestroy_v2(ctypes.c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        deadline = time.monotonic() + GUARD_S
        while self.lib.cuStreamQuery(ctypes.c_void_p(stream)) != 0:
            assert time.monotonic() < deadline, "the stream hangs"
            time.sleep(0.0002)

    @contextmanager
    def capture(self, stream: int) -> Iterator[int]:
        """The graph of what is enqueued inside, which is not executed."""
        graph = self.lib.fake_begin_capture(ctypes.c_void_p(stream))
        yield graph
        self.lib.fake_end_capture(ctypes.c_void_p(stream))

    def operations(self, graph: int) -> int:
        return self.lib.fake_graph_size(ctypes.c_void_p(graph))

    def launch(self, graph: int, stream: int) -> None:
        self.lib.fake_launch(ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def free_graph(self, graph: int) -> None:
        self.lib.fake_free_graph(ctypes.c_void_p(graph))


class Rows:
    """Rows to hand over, and room for their y (NaN until it is written)."""

    def __init__(self, count: int, experts: int, seed: int = 0, hidden: int = HIDDEN, k: int = TOP_K) -> None:
        rng = np.random.default_rng(seed)
        self.x = rng.standard_normal((count, hidden), dtype=np.float32)
        self.ids = rng.random((count, experts)).argsort(axis=1)[:, :k].astype(np.int32)
        self.weights = rng.random((count, k), dtype=np.float32)
        self.y = np.full_like(self.x, np.nan)

    def __len__(self) -> int:
        return len(self.x)

    def pretended_y(self) -> np.ndarray:
        """What Side.pretend's experts answer, in the order in which they compute it."""
        factor = np.zeros(len(self), np.float32)
        for j in range(self.ids.shape[1]):
            factor = factor + self.weights[:, j] * (self.ids[:, j] + 1).astype(np.float32)
        return self.x * factor[:, None]


class Side:
    """One hand-off and, for the kinds that have one, the stream it is used from."""

    def __init__(self, kind: str, fake: FakeCuda | None, hidden: int = HIDDEN, k: int = TOP_K, **options):
        self.kind, self.fake, self.stream = kind, fake, 0
        self._in_use: list[Rows] = []  # by copies that the stream has yet to make
        if kind in ("inline", "threaded"):
            if kind == "inline":
                options.pop("timeout_s", None)
            self.handoff: Handoff = {"inline": Inline, "threaded": Threaded}[kind](hidden, k, **options)
        else:
            assert fake is not None
            made = {"stream_memops": StreamMemOps, "host_func": HostFunc}[kind]
            self.handoff = made(hidden, k, **({"dtype": "f32"} | options), driver=fake.path)
            self.stream = fake.new_stream()

    def pretend(self, layer: int, sleep_s: float = 0.0, error: str = "") -> None:
        self.handoff._native.set_pretended(layer, round(sleep_s * 1e6), error)

    def submit(self, slot: Slot, rows: Rows) -> None:
        self._in_use.append(rows)
        addresses = (rows.x.ctypes.data, rows.ids.ctypes.data, rows.weights.ctypes.data)
        self.handoff.submit(slot, len(rows), *addresses, stream=self.stream)

    def wait(self, slot: Slot, rows: Rows) -> None:
        self._in_use.append(rows)
        self.handoff.wait(slot, rows.y.ctypes.data, stream=self.stream)

    def finish(self) -> None:
        """The end of a step: all that was enqueued has happened, and failed if something did."""
        if self.stream:
            assert self.fake is not None
            self.fake.synchronize(self.stream)
        self._in_use.clear()
        self.handoff.check()

    def run(self, slot: Slot, rows: Rows) -> np.ndarray:
        """A step of one submission."""
        self.submit(slot, rows)
        self.wait(slot, rows)
        self.finish()
        return rows.y

    def close(self) -> None:
        self.handoff.close()
        if self.stream:
            assert self.fake is not None
            self.fake.synchronize(self.stream)
            self.fake.destroy_stream(self.stream)
            self.stream = 0


Make = Callable[..., Side]  # the fixture `make`


def works(side: Side, slot: Slot) -> None:
    """A step of the slot's layer, which is a pretended one, gives what it should."""
    rows = Rows(2, 8, seed=99)
    assert np.array_equal(side.run(slot, rows), rows.pretended_y())
