"""What the bus carries to the device: experts from pinned, registered and ordinary memory, and a ring's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gpu_parts.lines import Line, Setting
from isthmus.formats.spec import by_name

EXPERT_BYTES = 3 * 2048 * by_name("q4_k").row_bytes(7168)  # gate, up and down of DeepSeek-V3: 24.8 MB
STAGES, EXPERTS = 3, 16
SECONDS = 1.0


def ring(setting: Setting) -> Iterator[Line]:
    if not setting.on_gpu:
        return
    with torch.cuda.device(setting.device):
        on_device = [torch.empty(EXPERT_BYTES, dtype=torch.uint8, device="cuda") for _ in range(STAGES)]
        weights = torch.zeros(EXPERTS, EXPERT_BYTES, dtype=torch.uint8)  # as packed tiles lie in memory
        pinned = [torch.empty(EXPERT_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(STAGES)]

        def from_pinned(turn: int) -> None:
            on_device[turn % STAGES].copy_(pinned[turn % STAGES], non_blocking=True)

        def from_memory(turn: int) -> None:
            on_device[turn % STAGES].copy_(weights[turn % EXPERTS], non_blocking=True)

        yield _rate("an expert from pinned memory", from_pinned)
        yield _rate("an expert from ordinary memory", from_memory)
        yield _rate("an expert through a ring of pinned stages", _through_stages(weights, pinned, on_device))
        yield from _registered(weights, from_memory)
        yield from _beside_products(from_pinned)


def _through_stages(weights: Tensor, pinned: list[Tensor], on_device: list[Tensor]) -> Callable[[int], None]:
    """The CPU fills a stage while the one before it crosses."""
    crossed = [torch.cuda.Event() for _ in pinned]
    for event in crossed:
        event.record()

    def turn(number: int) -> None:
        stage = number % STAGES
        crossed[stage].synchronize()
        pinned[stage].copy_(weights[number % EXPERTS])
        on_device[stage].copy_(pinned[stage], non_blocking=True)
        crossed[stage].record()

    return turn


def _registered(weights: Tensor, copy: Callable[[int], None]) -> Iterator[Line]:
    """The tiles' own memory made known to the driver: no staging copy."""
    cudart = torch.cuda.cudart()
    begin = time.perf_counter()
    code = int(cudart.cudaHostRegister(weights.data_ptr(), weights.nbytes, 0))
    taken = time.perf_counter() - begin
    if code:
        yield Line("registering memory", note=f"cudaHostRegister gave {code}")
        return
    try:
        yield Line("registering memory", gb_s=weights.nbytes / taken / 1e9)
        yield _rate("an expert from registered memory", copy)
    finally:
        torch.cuda.synchronize()
        cudart.cudaHostUnregister(weights.data_ptr())


def _beside_products(copy: Callable[[int], None]) -> Iterator[Line]:
    """Whether copies on a stream of their own go on while the card multiplies, and what that costs both."""
    a = torch.randn(4096, 4096, device="cuda").bfloat16()
    copies = torch.cuda.Stream()

    def times(products: int, num_copies: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.cuda.stream(copies):
            for turn in range(num_copies):
                copy(turn)
        for _ in range(products):
            torch.mm(a, a)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    times(2, 2)
    products, num_copies = 200, 100
    alone = times(products, 0), times(0, num_copies)
    both = times(products, num_copies)
    yield Line("products and copies: one after the other over at once", value=sum(alone) / both, unit="times")


def _rate(what: str, copy: Callable[[int], None]) -> Line:
    for turn in range(STAGES):
        copy(turn)
    torch.cuda.synchronize()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        for _ in range(STAGES):
            copy(count)
            count += 1
        if count % (8 * STAGES) == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return Line(what, gb_s=count * EXPERT_BYTES / (time.perf_counter() - begin) / 1e9)
