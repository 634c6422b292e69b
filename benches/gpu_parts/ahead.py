"""Kernels that the models of other parts will launch, compiled by all CPUs before they do.

Triton compiles when a kernel is first launched, one after the other in the process that waits for it: of a
model for a minute and more. What it makes it keeps on disk, under a name that follows from the kernel, its
constants and the card's compute capability. So here each model is computed once on memory that does not
exist, which tells what it launches, and each of these is compiled in one of many processes that never see
the card.

As a program: python -m gpu_parts.ahead CAPABILITY [MOST]; prints how many kernels that were, and a line for
each that does not compile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpu_parts.lines import Line, Setting, in_one_line
from gpu_parts.models import DEEPSEEK, PROMPT, QWEN3
from gpu_parts.shapes import TINY, source_of
from gpu_parts.steps import PROMPTS, REAL
from isthmus.config import DEFAULT_CONTEXT_TOKENS, RunOptions
from isthmus.engine.batch import Batch
from isthmus.engine.device_runner import WARM_ROWS, _of_one_sequence
from isthmus.engine.state import State
from isthmus.formats.spec import AS_Q8_0
from isthmus.gpu import launch
from isthmus.gpu.tiles import PackedMatrix
from isthmus.models.base import load_model
from isthmus.modules.loader import Loader
from isthmus.modules.on_gpu import weights
from isthmus.modules.on_gpu.step import DeviceStep, DeviceSteps
from isthmus.modules.on_gpu.target import Target, Targets
from isthmus.placement.captured import decode_buckets
from isthmus.weights.source import RawTensor

Launch = tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, int]]  # as `launch.recorded` gives them


@dataclass(frozen=True)
class Job:
    """A model as a part runs it."""

    model: str
    options: RunOptions


def jobs() -> list[Job]:
    steps, models = RunOptions(parallel=len(PROMPTS)), RunOptions(context_tokens=2 * PROMPT)
    exact = RunOptions(parallel=len(PROMPTS), exact_batching=True, speculate="ngram")
    over_q8_0 = RunOptions(parallel=len(PROMPTS), kv_dtype="q8_0")
    return [
        *(Job(model, steps) for model in TINY + REAL),
        *(Job(model, over_q8_0) for model in TINY),
        *(Job(model, models) for model in (QWEN3, DEEPSEEK)),
        *(Job(model, exact) for model in TINY + REAL[:1]),
    ]


def ahead(setting: Setting) -> Iterator[Line]:
    if not setting.on_gpu:
        return
    major, minor = torch.cuda.get_device_capability(setting.device)
    begin = time.perf_counter()
    where = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "gpu_parts.ahead", str(10 * major + minor)],
        env=os.environ | {"PYTHONPATH": where},
        capture_output=True,
        text=True,
    )
    taken = time.perf_counter() - begin
    if done.returncode:  # others compile for themselves, then
        yield Line("compiling ahead broke off", note=done.stderr.strip().rpartition("\n")[2])
        return
    count, *failed = done.stdout.splitlines()
    yield Line("kernels compiled ahead", value=float(count), note=f"in {taken:.0f} s")
    for name, _, error in (line.partition(" ") for line in failed):
        yield Line(f"{name} does not compile", note=error, failed=True)


@dataclass(frozen=True)
class Imagined:
    """A model and its caches in memory that does not exist, as loading it on a card with all its experts
    would make them. width: of block tables."""

    model: Any
    target: Target
    state: State
    width: int

    def prefill(self, batch: Batch) -> None:
        step = self.model.prepare(batch, self.width)
        self.model.compute(DeviceSteps.of(step, [self.target]), self.state)

    def decode(self, rows: int) -> None:
        step = DeviceStep.for_decodes(rows, self.width, self.target)
        self.model.compute(DeviceSteps({self.target: step}), self.state)

    def warm_up(self, options: RunOptions) -> None:
        """What DeviceRunner.warm_up does."""
        for rows in (options.chunk_tokens, *WARM_ROWS):
            self.prefill(_of_one_sequence(min(rows, 64 * self.width), self.width))
        for rows in decode_buckets(options):
            self.decode(rows)


@contextmanager
def imagined(job: Job, found: dict[Any, Launch]) -> Iterator[Imagined]:
    """found: gets what the model launches inside."""
    source, options = source_of(job.model), job.options
    target = Target.of("meta", kernels="triton", exact=options.exact_batching)
    gates = [name for name in source.tensors if name.endswith("ffn_gate_exps.weight")]
    slots = {int(name.split(".")[1]): range(source.tensors[name].shape[0]) for name in gates}
    trained = int(source.metadata[f"{source.metadata['general.architecture']}.context_length"])
    width = -(-(options.context_tokens or min(trained, DEFAULT_CONTEXT_TOKENS)) // 64)
    with (
        patch("isthmus.modules.builder.Loader", _NoBytes),
        patch.object(weights, "_upload", _upload_nothing),
        launch.recorded(lambda *one: found.setdefault(_key(*one), one)),  # type: ignore[arg-type]
        torch.inference_mode(),
    ):
        model: Any = load_model(source, options, targets=Targets.one(target, slots))
        state = State(model.state_spec(), width, options.kv_dtype, [target.device] * len(model.layers))
        yield Imagined(model, target, state, width)


def launches_of(job: Job, found: dict[Any, Launch]) -> None:
    """Adds what loading the model would launch."""
    with imagined(job, found) as made:
        made.warm_up(job.options)


class _NoBytes(Loader):
    def values(self, raw: RawTensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(raw.shape, dtype=dtype, device="meta")

    def vector(self, raw: RawTensor) -> Tensor:
        return torch.empty(prod(raw.shape), device="meta")


def _upload_nothing(loader: Loader, raw: RawTensor, target: Target) -> weights.Uploaded:
    if not weights.stays_packed(raw):
        return weights.upload_plain(loader, raw, target)
    name = "q8_0" if raw.format.name in AS_Q8_0 else raw.format.name
    return PackedMatrix.empty(name, *(1, *raw.shape)[-3:], target.device)


def _key(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, int]) -> Any:
    """What triton compiles anew for."""

    def of(parameter: Any, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return arg.dtype, arg.storage_offset() * arg.element_size() % 16 == 0
        if not isinstance(arg, int) or parameter.do_not_specialize:
            return type(arg)
        return arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31

    kinds = tuple(of(parameter, arg) for parameter, arg in zip(kernel.params, args, strict=False))
    return kernel.fn.__name__, kinds, tuple(constants.items()), tuple(options.items())


class _NoDriver:
    """What triton asks of a card before it compiles for it."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


# Launches cannot be sent to another process, so workers are forked with the list.
_WORK: list[Launch] = []


def _compile(index: int) -> str:
    """Empty, or the kernel's name and the compiler's error."""
    torch.set_num_threads(1)
    kernel, args, constants, options = _WORK[index]
    try:
        kernel.warmup(*args, grid=(1,), **constants, **options, enable_fp_fusion=True)
    except Exception as error:
        return f"{kernel.fn.__name__} {in_one_line(error)}"
    return ""


def compile_ahead(capability: int, most: int | None = None) -> list[str]:
    """How many were compiled, then a line for each kernel that cannot be: its name and why."""
    from triton.runtime.driver import driver

    found: dict[Any, Launch] = {}
    for job in jobs() if most is None else jobs()[:1]:
        launches_of(job, found)
    driver.set_active(_NoDriver(capability))
    _WORK.extend(list(found.values())[:most])
    with get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        failed = [error for error in pool.imap_unordered(_compile, range(len(_WORK))) if error]
    return [str(len(_WORK) - len(failed)), *sorted(set(failed))]


if __name__ == "__main__":
    print(*compile_ahead(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None), sep="\n")
