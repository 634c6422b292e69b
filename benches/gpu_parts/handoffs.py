"""What it costs to give a layer's experts to the CPU from inside a CUDA graph, by mechanism."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_parts.lines import Line, Setting, microseconds
from isthmus.errors import HandoffError
from isthmus.native.handoff import HostFunc, StreamMemOps

LAYERS, HIDDEN, TOP_K = 58, 7168, 8  # of DeepSeek-V3
REPLAYS = 200


def memops(setting: Setting) -> Iterator[Line]:
    yield from _in_a_graph(setting, StreamMemOps)


def hostfunc(setting: Setting) -> Iterator[Line]:
    yield from _in_a_graph(setting, HostFunc)


def _in_a_graph(setting: Setting, kind: type[StreamMemOps] | type[HostFunc]) -> Iterator[Line]:
    """A graph of LAYERS submissions and waits, one row each, with experts that only scale x.

    Each mechanism is a part: one that never ends is ended with its process.
    """
    if not setting.on_gpu:
        return
    with torch.cuda.device(setting.device):
        yield _copies_alone()
        yield from _latency(kind, setting.device.index or 0)


def _rows() -> tuple[torch.Tensor, ...]:
    """x, ids, weights and y of one row, on the device."""
    return (
        torch.ones(1, HIDDEN, dtype=torch.bfloat16, device="cuda"),
        torch.zeros(1, TOP_K, dtype=torch.int32, device="cuda"),
        torch.ones(1, TOP_K, device="cuda"),
        torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device="cuda"),
    )


def _copies_alone() -> Line:
    on_device = _rows()
    pinned = [rows.cpu().pin_memory() for rows in on_device]

    def layers() -> None:
        for _ in range(LAYERS):
            for host, device in zip(pinned[:3], on_device[:3], strict=True):
                host.copy_(device, non_blocking=True)
            on_device[3].copy_(pinned[3], non_blocking=True)

    return Line("its four copies alone, a layer", microseconds=microseconds([layers], REPLAYS) / LAYERS)


def _latency(kind: type[StreamMemOps] | type[HostFunc], index: int) -> Iterator[Line]:
    stream = torch.cuda.Stream()
    try:
        made = kind(HIDDEN, TOP_K, dtype="bf16", device=index)
    except HandoffError as error:
        yield Line(f"hand-off, {kind.mechanism}", note=str(error))
        return
    for layer in range(LAYERS):
        made._native.set_pretended(layer, 0, "")
    slots = [made.register(layer, 1) for layer in range(LAYERS)]
    kept = _rows()
    x, ids, weights, y = (rows.data_ptr() for rows in kept)
    try:
        for copied, given, taken in (("with", (x, ids, weights), y), ("without", (0, 0, 0), 0)):

            def layers(given: tuple[int, int, int] = given, taken: int = taken) -> None:
                for slot in slots:
                    made.submit(slot, 1, *given, stream=stream.cuda_stream)
                    made.wait(slot, taken, stream=stream.cuda_stream)

            time = microseconds([layers], REPLAYS, stream) / LAYERS
            stream.synchronize()
            made.check()
            yield Line(f"hand-off, {kind.mechanism}, {copied} copies, a layer", microseconds=time)
        yield Line(f"hand-off, {kind.mechanism}: failures", float(made.counters().failures), 0.0)
    finally:
        torch.cuda.synchronize()
        made.close()
