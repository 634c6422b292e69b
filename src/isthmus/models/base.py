"""What every model is, the decoder they share, and how one is made from a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from isthmus.config import RunOptions
from isthmus.engine.batch import Batch, Step
from isthmus.engine.state import KvDtype, State, StateKind
from isthmus.models.config import DecoderConfig
from isthmus.models.keys import Keys
from isthmus.models.table import model_class
from isthmus.modules.builder import Builder
from isthmus.modules.cache import PackedStore
from isthmus.modules.router import Router
from isthmus.modules.split import ExpertSplit
from isthmus.weights.source import WeightSource


class Model(Protocol):
    config: DecoderConfig
    kv_dtype: KvDtype  # of the states it works on

    def forward(self, batch: Batch, state: State) -> Tensor:
        """fp32 [R, vocab]: logits of the rows in batch.logit_rows; writes the batch's rows into `state`."""

    def compute(self, step: Step, state: State) -> Tensor:
        """The same of a batch that is prepared."""

    def state_spec(self) -> list[StateKind]:
        """The kind of state of each layer."""

    def routers(self) -> dict[int, Router]:
        """By layer, of those that have experts."""


class Layer(Protocol):
    @property
    def state_kind(self) -> StateKind: ...

    def __call__(self, x: Tensor, step: Step, cache: Any) -> Tensor: ...


class Decoder:
    """Embedding, layers, norm, head: what all families share. Only the asked rows reach norm and head."""

    def __init__(self, build: Builder, config: DecoderConfig, layers: Sequence[Layer]) -> None:
        self.config = config
        self.kv_dtype = build.options.kv_dtype
        self.embedding = build.embedding("token_embd.weight", config.vocab_size, config.hidden)
        self.layers = layers
        self.norm = build.norm("output_norm.weight", config.hidden, config.eps)
        # Without a head of its own the embedding is tied: one packed tensor, read by both.
        head = "output" if build.has("output.weight") else "token_embd"
        self.head = build.linear({head: config.vocab_size}, config.hidden)

    def forward(self, batch: Batch, state: State) -> Tensor:
        if state.kv_dtype != self.kv_dtype:  # native code would write past the caches
            raise ValueError(f"a state of {state.kv_dtype} for a model loaded for {self.kv_dtype}")
        return self.compute(batch.prepare(self.config.vocab_size, state.num_blocks), state)

    def compute(self, step: Step, state: State) -> Tensor:
        batch = step.batch
        x = self.embedding(batch.tokens)
        for layer, cache in zip(self.layers, state.layers, strict=True):
            x = layer(x, step, cache)
        if batch.logit_rows.numel() == 0:  # a chunk inside a prompt
            return x.new_empty(0, self.config.vocab_size)
        if not step.wants_all_logits:
            x = x.index_select(0, batch.logit_rows)
        return self.head(self.norm(x))

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
) -> Model:
    """The model of general.architecture, its weights packed; `progress` gets the bytes of each tensor.

    `store`: where packed weights are found, or put; `split`: how routed experts are handed to the CPU.
    """
    keys = Keys(source.metadata)
    build = Builder(source, options, progress, store, split)
    model: Model = model_class(keys.architecture)(build, keys)
    build.finish()
    return model
