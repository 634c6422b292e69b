"""Where a kernel is started: on the device of its tensors, whichever is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from isthmus.gpu.launch import launch


class OnCard(torch.Tensor):
    """Says of itself that it lies on the second card."""

    device = torch.device("cuda:1")


class Kernel:
    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self._log.append(
            (grid, options["num_warps"], options["enable_fp_fusion"])
        )


@pytest.mark.parametrize(("current", "switched"), [(0, ["cuda:1"]), (1, [])])
def test_it_is_the_tensors_device(current: int, switched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        log.append(str(which))
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    tensor = torch.empty(2).as_subclass(OnCard)
    launch(Kernel(log), (3,), None, tensor, 7, warps=4)
    assert log == [*switched, ((3,), 4, True)]


def test_an_empty_grid_is_no_work() -> None:
    log: list[Any] = []
    launch(Kernel(log), (0, 3), torch.empty(2), warps=4)
    assert not log
