"""The seam through which experts' bytes reach a device, and copies and computations are ordered there.

On a CUDA device copies have a stream of their own and are ordered by events (on_gpu.copies); with CPU threads
in its place whoever asks for a copy has made it when the call returns, and nothing needs to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Copies(Protocol):
    """`stage`: a number, of memory that is filled and computed from in turn."""

    def copy(self, fill: Callable[[int], None], to: Tensor) -> None:
        """Into `to`, uint8 on the device, what `fill` writes at an address of the host; in the order of
        calls."""

    def follow(self) -> None:
        """Copies that come now wait for all computations so far: whatever these read may be written then."""

    def before_copies(self, stage: int) -> None:
        """The same for a stage's memory; for what computes from it alone, once something does."""

    def after_copies(self, stage: int) -> None:
        """The stage's copies are all asked for."""

    def before_use(self, stage: int) -> None:
        """Computations that follow wait for the stage's copies."""

    def after_use(self, stage: int) -> None:
        """The computations from this stage are all asked for."""

    def later(self, fill: Callable[[], None]) -> Callable[[], bool]:
        """Has `fill` make copies, beside the caller and after the computations so far; whether they are done
        is what the result says, without waiting. It raises what `fill` raised."""

    def finish(self) -> None:
        """Waits for all copies and computations so far."""


class HostCopies:
    """CPU threads in the device's place."""

    def copy(self, fill: Callable[[int], None], to: Tensor) -> None:
        fill(to.data_ptr())

    def follow(self) -> None: ...
    def before_copies(self, stage: int) -> None: ...
    def after_copies(self, stage: int) -> None: ...
    def before_use(self, stage: int) -> None: ...
    def after_use(self, stage: int) -> None: ...

    def later(self, fill: Callable[[], None]) -> Callable[[], bool]:
        fill()
        return lambda: True

    def finish(self) -> None: ...
