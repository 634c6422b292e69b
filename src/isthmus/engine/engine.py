"""A loaded model that answers requests: file -> plan -> weights -> state -> the step loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from isthmus import native
from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine.loop import StepLoop
from isthmus.engine.request import ModelInfo
from isthmus.engine.runner import Runner
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.state import State
from isthmus.errors import UsageError
from isthmus.models.base import load_model
from isthmus.models.table import model_class
from isthmus.placement.machine import Machine
from isthmus.placement.plan import plan as make_plan
from isthmus.weights.source import open_weights

# Called with (bytes taken from the file so far, bytes in all).
Progress = Callable[[int, int], None]


class Engine(StepLoop):
    """The step loop over a real model, with what it has loaded in `info`. For one thread, as the loop is."""

    def __init__(
        self, model_path: Path, options: RunOptions | None = None, progress: Progress | None = None
    ) -> None:
        """Raises ModelFileError, UsageError or NotEnoughMemoryError, before weights are read."""
        started = time.monotonic()
        options = (options or RunOptions()).with_environment()
        with closing(open_weights(model_path)) as source:
            architecture = str(source.metadata.get("general.architecture"))
            model_class(architecture)  # what cannot be run is said before what does not fit
            plan = make_plan(Machine.detect(), source, options)
            _use_isa(options.isa)
            native.set_threads(plan.threads)
            file_bytes = sum(len(tensor.data) for tensor in source.tensors.values())
            model = load_model(source, options, _counted(progress, file_bytes) if progress else None)
        # From here on the native pool is the only one with threads: two pools would fight for the cores.
        torch.set_num_threads(1)
        self.plan = plan
        state = State(model.state_spec(), plan.num_blocks, options.kv_dtype)
        self.info = ModelInfo(
            name=model_path.name.removesuffix(".gguf"),
            architecture=architecture,
            vocab_size=model.config.vocab_size,
            context_tokens=plan.context_tokens,
            isa=native.current_isa(),
            threads=native.num_threads(),
            weight_bytes=plan.weight_bytes,
            kv_bytes=plan.kv_bytes,
            load_seconds=time.monotonic() - started,
        )
        scheduler = Scheduler(plan.num_blocks, BLOCK_TOKENS, plan.context_tokens, options.chunk_tokens)
        super().__init__(Runner(model, state, BLOCK_TOKENS), scheduler, self.info.vocab_size)

    def close(self) -> None:
        """Gives the model's memory back. The engine answers nothing afterwards."""
        del self._executor


def _use_isa(name: str | None) -> None:
    if name is None:
        return
    try:
        native.use_isa(name)
    except ValueError as error:
        have = ", ".join(native.isa_names())
        raise UsageError(f"instruction set {name!r} was asked for; this CPU runs {have}") from error


def _counted(progress: Progress, total: int) -> Callable[[int], None]:
    """The loader reports each tensor's bytes; the caller wants how far it is."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return add
