"""A loaded model that answers requests: file -> plan -> weights -> state -> the step loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isthmus import native
from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine.device_runner import DeviceRunner, give_back_cached_memory
from isthmus.engine.device_trace import DeviceSpan
from isthmus.engine.devices import StandIns, device_name, executable_plan
from isthmus.engine.expert_cache import LearningRunner
from isthmus.engine.kv_blocks import CopyingRunner
from isthmus.engine.kv_tiers import tiers_below
from isthmus.engine.loading import load
from isthmus.engine.loop import Executor, Logits, StepLoop
from isthmus.engine.mask import Grammars
from isthmus.engine.packed_cache import Progress, counted, open_cache
from isthmus.engine.request import EngineStats, ModelInfo
from isthmus.engine.runner import LaterLogits
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.errors import UnsupportedError, UsageError
from isthmus.models.table import model_class
from isthmus.modules.split import ExpertUse, sum_of
from isthmus.native.handoff import Counters, Event
from isthmus.placement.machine import Machine
from isthmus.placement.nodes import NodeChoice, choose_nodes, read_rate
from isthmus.weights.source import WeightSource, open_weights

if TYPE_CHECKING:
    from isthmus.modules.cache import PackedCache


class Engine(StepLoop):
    """The step loop over a real model, with what it has loaded in `info`. For one thread, as the loop is."""

    def __init__(
        self,
        model_path: Path,
        options: RunOptions | None = None,
        progress: Progress | None = None,
        source: WeightSource | None = None,
        *,
        stand_ins: StandIns | None = None,
        graphs: bool = True,
    ) -> None:
        """`source`: the model if it is open already; the engine does not close it. stand_ins: devices in the
        places of a plan's. graphs: whether decode steps on a GPU are captured.

        Raises ModelFileError, UsageError, DeviceError or NotEnoughMemoryError, before weights are read: but
        for a GPU that turns out to be full.
        """
        started = time.monotonic()
        options = (options or RunOptions()).with_environment()
        with ExitStack() as opened:
            if source is None:
                source = opened.enter_context(closing(open_weights(model_path)))
            identity = source.identity() if options.kv_disk is not None else []
            architecture = str(source.metadata.get("general.architecture"))
            model_class(architecture)  # what cannot be run is said before what does not fit
            if not source.tensors:
                raise UnsupportedError(f"{source.path}: has no tensor, perhaps a vocabulary alone")
            grammars = partial(_grammars, source.metadata)
            machine = Machine.detect()
            _use_isa(options.isa)
            file_bytes = sum(tensor.nbytes for tensor in source.tensors.values())
            choice = _use_threads(options, file_bytes)
            cache = open_cache(source, options, progress)
            # On several nodes the cache is copied into the memory of each (design 4.5).
            machine = replace(machine, nodes=native.num_nodes())
            mapped = cache is not None and machine.nodes == 1
            plan_for = partial(executable_plan, machine, source, mapped=mapped, stand_ins=stand_ins)
            loaded = load(
                plan_for(options),
                source,
                options,
                partial(counted, progress, file_bytes),
                cache,
                plan_for_cpu=plan_for,
                stand_ins=stand_ins,
                graphs=graphs,
            )
        if cache is not None:
            cache.check()  # a step does, of what it reads in place
        # From here on the native pool is the only one with threads: two pools would fight for the cores.
        torch.set_num_threads(1)
        self.plan = plan = loaded.plan
        self._routers = loaded.model.routers()
        self._splits = loaded.splits
        self._handoffs, self._devices = loaded.handoffs, loaded.devices
        self.info = ModelInfo(
            name=model_path.name.removesuffix(".gguf"),
            architecture=architecture,
            vocab_size=loaded.model.config.vocab_size,
            context_tokens=plan.context_tokens,
            isa=native.current_isa(),
            threads=native.num_threads(),
            weight_bytes=plan.weight_bytes,
            kv_bytes=plan.kv_bytes,
            load_seconds=time.monotonic() - started,
            nodes=native.num_nodes(),
            nodes_reason=choice.reason,
            strategy=plan.strategy,
            devices={name: device_name(device) for name, device in loaded.devices.items()},
            device_bytes=self.device_bytes,
            handoff=loaded.handoffs.mechanism,
            parallel=options.parallel,
            kv_tokens=plan.num_blocks * BLOCK_TOKENS,
        )
        scheduler = Scheduler(
            plan.num_blocks, BLOCK_TOKENS, plan.context_tokens, options.chunk_tokens, options.parallel
        )
        # What deferral makes of an answer's tokens is not what a prompt's would be: nobody finds it.
        scheduler.keeps_answers = not options.defer_experts
        self._runner = loaded.runner
        runner: Executor = self._runner
        self._tiers = scheduler.prefixes.tiers = tiers_below(plan, options, identity, self._runner)
        if self._tiers is not None:
            runner = CopyingRunner(runner, self._tiers.blocks, BLOCK_TOKENS)
        if loaded.caches:
            runner = LearningRunner(runner, loaded.caches)
        if cache is not None and mapped:
            runner = _OverMappedWeights(runner, cache)
        super().__init__(
            runner, scheduler, self.info.vocab_size, grammars, speculate=options.speculate == "ngram"
        )

    def close(self) -> None:
        """Gives the model's memory back. The engine answers nothing afterwards."""
        self._compiler.close()
        if self._tiers is not None:
            self._tiers.close()
        self._tiers = self._scheduler.prefixes.tiers = None
        if isinstance(self._runner, DeviceRunner):
            self._runner.close()
        del self._executor, self._runner, self._routers
        self._splits = ()
        self._handoffs.close()
        if self._devices:
            give_back_cached_memory()

    def stats(self) -> EngineStats:
        """Where the loop is now, what it has done, and what is below its cache."""
        read_bytes, read_ns = native.expert_reads()
        return replace(
            super().stats(),
            tiers=self._tiers.stats() if self._tiers is not None else (),
            expert_read_bytes=read_bytes,
            expert_seconds=read_ns / 1e9,
        )

    def count_experts(self) -> dict[int, Counter[int]]:
        """By layer, how many rows choose each expert from now on; the counts go on with every step."""
        counts: dict[int, Counter[int]] = {layer: Counter() for layer in self._routers}

        def counting(layer: int) -> Callable[[Tensor], None]:
            return lambda ids: counts[layer].update(ids.flatten().tolist())

        for layer, router in self._routers.items():
            router.observe = counting(layer)
        return counts

    def take_handoff_events(self) -> list[Event]:
        """What the hand-off did since the last call; nothing where there is none."""
        return self._handoffs.take_events()

    @contextmanager
    def traced_on_devices(self) -> Iterator[list[DeviceSpan]]:
        """Steps within are called on devices, not replayed, and the list gets what each did when. Nothing
        where modules are native, whose operators keep a log of their own."""
        spans: list[DeviceSpan] = []
        runner = self._runner
        if not isinstance(runner, DeviceRunner):
            yield spans
            return

        def execute(plan: StepPlan) -> Tensor | LaterLogits:
            logits, of_step = runner.traced(plan)
            spans.extend(of_step)
            return logits

        before = runner.execute
        runner.execute = execute  # type: ignore[method-assign]
        try:
            yield spans
        finally:
            runner.execute = before  # type: ignore[method-assign]

    @property
    def handed_over(self) -> Counters | None:
        """What has crossed between devices so far; None where the CPU is the device of everything."""
        return self._handoffs.counters() if self._handoffs else None

    @property
    def device_bytes(self) -> dict[str, int]:
        """What torch's allocator has taken of each GPU, at most so far."""
        gpus = {name: device for name, device in self._devices.items() if device.type == "cuda"}
        return {name: torch.cuda.max_memory_reserved(device) for name, device in gpus.items()}

    @property
    def expert_use(self) -> ExpertUse | None:
        """Which device computed choices of experts so far, and what was copied for that; None as above."""
        return sum_of([split.use() for split in self._splits]) if self._splits else None


class _OverMappedWeights:
    """A runner whose weights are a file: a step that the file failed is an error, whatever it gave."""

    def __init__(self, runner: Executor, cache: PackedCache) -> None:
        self._runner = runner
        self._cache = cache

    def execute(self, plan: StepPlan) -> Logits:
        try:
            logits = self._runner.execute(plan)
        finally:
            self._cache.check()
        return logits.checked(self._cache.check) if isinstance(logits, LaterLogits) else logits


def _grammars(metadata: Mapping[str, Any]) -> Grammars:
    """What compiles grammars, made for the first request that has one."""
    from isthmus.engine.token_mask import VocabularyGrammars
    from isthmus.tokenizer import Tokenizer

    return VocabularyGrammars(Tokenizer.from_gguf(metadata))


def _use_isa(name: str | None) -> None:
    if name is None:
        return
    try:
        native.use_isa(name)
    except ValueError as error:
        have = ", ".join(native.isa_names())
        raise UsageError(f"instruction set {name!r} was asked for; this CPU runs {have}") from error


def _use_threads(options: RunOptions, weight_bytes: int) -> NodeChoice:
    """Starts the pool's threads where they will stay: weights are packed into memory of their nodes."""
    machine = native.this_machine()
    if options.fake_numa is not None:
        choice = NodeChoice(options.fake_numa, options.threads or machine.default_threads)
    else:
        first_node_bytes = native.node_bytes("", machine.nodes[0])
        choice = choose_nodes(machine, options.threads, weight_bytes, first_node_bytes, read_rate)
    native.set_threads(choice.threads, choice.nodes)
    return choice
