"""The two places where a layer of its own keeps norm, router and shared expert: the CPU, or a torch device.

Both give rows to the same kind of hand-off. On a device calls only queue work, and times are those of its
stream: an event between two parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from isthmus.errors import DeviceError
from isthmus.gpu.fp8 import Fp8Matrix
from isthmus.modules.experts import Gated, Matrices, PackedMatrices, operator, pack_matrices
from isthmus.modules.loader import Loader
from isthmus.modules.norm import RmsNorm
from isthmus.modules.on_gpu.ffn import Ffn, beside
from isthmus.modules.on_gpu.target import Target
from isthmus.modules.on_gpu.weights import Weight, upload
from isthmus.modules.router import Router
from isthmus.native import rows
from isthmus.native.handoff import Handoff
from isthmus.weights.source import RawTensor


def usable(device: torch.device | str) -> torch.device:
    """With its number. Raises DeviceError for one that is not here."""
    found = torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(
            f"{found} is to be used; torch {torch.__version__} has "
            f"{'no CUDA' if torch.version.cuda is None else 'no usable CUDA device'}: leave device out, or "
            'give "cpu"'
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"cuda:{index} is to be used; torch sees {torch.cuda.device_count()} devices")
    return torch.device("cuda", index)


class Side(Protocol):
    """h: normalised rows [T, H]; residual fp32 [T, H]; all on the side's device."""

    device: torch.device

    def residual(self, x: Tensor) -> Tensor:
        """x [.., H] of any float dtype as fp32 [T, H]."""

    def choose(self, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(h, ids int32 [T, k], weights fp32 [T, k])."""

    def shared(self, h: Tensor, residual: Tensor) -> Tensor | None:
        """What `add` wants of the shared expert."""

    def add(self, y: Tensor, shared: Tensor | None, residual: Tensor) -> Tensor:
        """fp32 [T, H]. y: the routed experts' sum, as it crossed."""

    def here(self) -> AbstractContextManager[Any]:
        """In which all of the above is called."""

    def stream(self) -> int: ...
    def clock(self) -> Clock: ...
    def finish(self, handoff: Handoff) -> None:
        """The rows are there. Raises HandoffError."""


class Clock:
    """Seconds of the host."""

    def __init__(self) -> None:
        self._marks: dict[str, tuple[Any, Any]] = {}
        self._begin = self._now()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._marks[part] = (begin, self._now())

    def ms(self, part: str) -> float:
        """Once all is done."""
        return self._between(*self._marks[part])

    def total_ms(self) -> float:
        return self._between(self._begin, self._now())

    def _now(self) -> Any:
        return time.perf_counter()

    def _between(self, begin: Any, end: Any) -> float:
        return float(end - begin) * 1e3


class EventClock(Clock):
    """Of the current CUDA stream."""

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end))


class OneExpert:
    """Experts without routing of their own; as a shared one: every row takes expert 0."""

    def __init__(self, matrices: Matrices) -> None:
        self._raw = matrices

    def load(self, loader: Loader) -> None:
        packed: PackedMatrices = pack_matrices(loader, self._raw)
        self.native = operator(packed, exact=False)
        del self._raw

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.native(x.data_ptr(), x.shape[0], 0, 0, 1, 0, out.data_ptr(), 0)
        return out


class OnCpu:
    def __init__(self, norm: RmsNorm, router: Router, shared: OneExpert | None) -> None:
        self.device = torch.device("cpu")
        self._norm, self._router, self._shared = norm, router, shared

    def residual(self, x: Tensor) -> Tensor:
        return x.detach().cpu().reshape(-1, x.shape[-1]).float().contiguous()

    def choose(self, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self._norm(residual)
        return h, *self._router(h)

    def shared(self, h: Tensor, residual: Tensor) -> Tensor | None:
        return self._shared(h) if self._shared else None

    def add(self, y: Tensor, shared: Tensor | None, residual: Tensor) -> Tensor:
        """In the order of the operator that does it all at once."""
        out = y.float()
        tokens, hidden = out.shape
        beside = 0 if shared is None else shared.data_ptr()
        rows.join(out.data_ptr(), tokens, hidden, shared=beside, residual=residual.data_ptr())
        return out

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stream(self) -> int:
        return 0

    def clock(self) -> Clock:
        return Clock()

    def finish(self, handoff: Handoff) -> None:
        """`wait` has raised what failed."""


class SharedFfn:
    """Of matrices of which some or all are FP8."""

    def __init__(self, target: Target, matrices: Gated[RawTensor | Fp8Matrix]) -> None:
        self._raw, self._target = matrices, target

    def load(self, loader: Loader) -> None:
        self.ffn = Ffn(self._target, self._raw.map(lambda raw: self._put(loader, raw)))
        del self._raw

    def _put(self, loader: Loader, raw: RawTensor | Fp8Matrix) -> Weight:
        return (
            raw.to(self._target.device) if isinstance(raw, Fp8Matrix) else upload(loader, raw, self._target)
        )


class OnDevice:
    def __init__(self, target: Target, norm: RmsNorm, router: Router, shared: SharedFfn | None) -> None:
        self.device = target.device
        self._target, self._norm, self._router, self._shared = target, norm, router, shared

    def residual(self, x: Tensor) -> Tensor:
        return x.detach().to(self.device).reshape(-1, x.shape[-1]).float().contiguous()

    def choose(self, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self._norm(residual)  # in the dtype that crosses
        return h, *self._router(h)

    def shared(self, h: Tensor, residual: Tensor) -> Tensor | None:
        return beside(self._shared.ffn if self._shared else None, h, residual, None)

    def add(self, y: Tensor, shared: Tensor | None, residual: Tensor) -> Tensor:
        return y.float() + (residual if shared is None else shared)

    def here(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def stream(self) -> int:
        return self._target.stream()

    def clock(self) -> Clock:
        return EventClock() if self.device.type == "cuda" else Clock()

    def finish(self, handoff: Handoff) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        handoff.check()
