"""What every model is, the decoder they share, and how one is made from a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from isthmus.config import RunOptions
from isthmus.engine.batch import Batch, Step
from isthmus.engine.state import State, StateKind
from isthmus.formats.kv_cache import KvDtype
from isthmus.models.config import DecoderConfig
from isthmus.models.keys import Keys
from isthmus.models.stages import LayerPart, Stage, stages_of
from isthmus.models.table import model_class
from isthmus.modules.builder import Builder
from isthmus.modules.lanes import Part
from isthmus.modules.loader import PackedStore
from isthmus.modules.on_gpu.step import DeviceStep, DeviceSteps
from isthmus.modules.on_gpu.target import Target, Targets
from isthmus.modules.router import Router
from isthmus.modules.split import ExpertSplit
from isthmus.weights.source import WeightSource

AnyStep: TypeAlias = Step | DeviceStep


class Model(Protocol):
    config: DecoderConfig
    kv_dtype: KvDtype  # of the states it works on

    def forward(self, batch: Batch, state: State) -> Tensor:
        """fp32 [R, vocab]: logits of the rows in batch.logit_rows; writes the batch's rows into `state`.

        Of a batch that projects later [R, hidden], any rows of which `project` takes.
        """

    def project(self, x: Tensor) -> Tensor:
        """fp32 [rows, vocab]: logits of normalised rows."""

    def prepare(self, batch: Batch, num_blocks: int) -> Step:
        """The batch checked, for caches of so many blocks; cut in two where halves are to take turns."""

    def compute(self, step: Step | DeviceSteps, state: State) -> Tensor:
        """The same of a batch that is prepared; on devices of one that is there. On the last one's memory."""

    def state_spec(self) -> list[StateKind]:
        """The kind of state of each layer."""

    def routers(self) -> dict[int, Router]:
        """By layer, of those that have experts."""


class Layer(Protocol):
    @property
    def state_kind(self) -> StateKind: ...

    def __call__(self, x: Tensor, step: Any, cache: Any) -> Tensor: ...


# What the first stage is given.
_NOTHING = torch.empty(0)


class Decoder:
    """Embedding, layers, norm, head: what all families share. Only the asked rows reach norm and head.

    targets: the devices of the layers, None for the native CPU. stages: the same model cut where the device
    changes.
    """

    def __init__(self, build: Builder, config: DecoderConfig, layers: Sequence[Layer]) -> None:
        self.config = config
        self.kv_dtype = build.options.kv_dtype
        self._overlap = build.options.overlap
        self.embedding = build.embedding("token_embd.weight", config.vocab_size, config.hidden)
        self.layers = layers
        self.norm = build.norm("output_norm.weight", config.hidden, config.eps)
        # Without a head of its own the embedding is tied: one packed tensor, read by both.
        head = "output" if build.has("output.weight") else "token_embd"
        self.head = build.head(head, config.vocab_size, config.hidden)
        self.targets = [build.target(f"blk.{i}.attn_norm.weight") for i in range(len(layers))]
        self._layer_parts = [self._layer(i) for i in range(len(layers))]
        names = ("token_embd.weight", "output_norm.weight", f"{head}.weight")
        self._outer_targets = [build.target(name) for name in names]
        self._split = build.split

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Made when asked for (11 us of 30 layers): kept, they would hold the model that holds them, and its
        gigabytes would stay until Python looks for cycles, perhaps after another model was loaded."""
        embedding, norm, head = self._outer_targets
        parts: list[tuple[Target | None, Part]] = [(embedding, self._embed)]
        parts += zip(self.targets, self._layer_parts, strict=True)
        return stages_of([*parts, (norm, self._normalise), (head, self._project)], self._split)

    def forward(self, batch: Batch, state: State) -> Tensor:
        if state.kv_dtype != self.kv_dtype:  # native code would write past the caches
            raise ValueError(f"a state of {state.kv_dtype} for a model loaded for {self.kv_dtype}")
        step = self.prepare(batch, state.num_blocks)
        targets = {target for target in (*self._outer_targets, *self.targets) if target is not None}
        return self.compute(DeviceSteps.of(step, targets) if targets else step, state)

    def prepare(self, batch: Batch, num_blocks: int) -> Step:
        step = batch.prepare(self.config.vocab_size, num_blocks)
        return step.cut() if self._overlap else step

    def compute(self, step: Step | DeviceSteps, state: State) -> Tensor:
        x = _NOTHING
        for stage in self.stages:
            x = stage(x, step.on(stage.target) if isinstance(step, DeviceSteps) else step, state)
        return x

    def _embed(self, _: Tensor, step: AnyStep, state: State) -> Tensor:
        return self.embedding(step.tokens)

    def _layer(self, index: int) -> Part:
        layer = self.layers[index]
        return LayerPart(lambda x, step, state: layer(x, step, state.layers[index]))

    def _normalise(self, x: Tensor, step: AnyStep, state: State) -> Tensor:
        if step.logit_rows.numel() == 0:  # a chunk inside a prompt
            return x[:0]
        return self.norm(x if step.wants_all_logits else x.index_select(0, step.logit_rows))

    def _project(self, x: Tensor, step: AnyStep, state: State) -> Tensor:
        return x if step.project_later else self.project(x)

    def project(self, x: Tensor) -> Tensor:
        return self.head(x) if len(x) else torch.empty(0, self.config.vocab_size)

    def routers(self) -> dict[int, Router]:
        """By layer, of those that have experts."""
        ffns = {i: getattr(layer, "ffn", None) for i, layer in enumerate(self.layers)}
        return {i: ffn.router for i, ffn in ffns.items() if ffn is not None and hasattr(ffn, "router")}

    def state_spec(self) -> list[StateKind]:
        return [layer.state_kind for layer in self.layers]


def load_model(
    source: WeightSource,
    options: RunOptions,
    progress: Callable[[int], None] | None = None,
    store: PackedStore | None = None,
    split: ExpertSplit | None = None,
    targets: Targets | None = None,
) -> Model:
    """The model of general.architecture, its weights packed; `progress` gets the bytes of each tensor.

    `store`: where packed weights are found, or put; `split`: how routed experts are handed to the CPU by
    itself; `targets`: which modules are on devices.
    """
    keys = Keys(source.metadata)
    build = Builder(source, options, progress, store, split, targets)
    model: Model = model_class(keys.architecture)(build, keys)
    build.finish()
    return model
