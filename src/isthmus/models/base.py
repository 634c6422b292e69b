"""What every model is, the decoder they share, and how one is made from a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from isthmus.config import RunOptions
from isthmus.engine.batch import Batch, Step
from isthmus.engine.state import KvDtype, State, StateKind
from isthmus.models.keys import Keys
from isthmus.modules.attention import AttentionConfig
from isthmus.modules.builder import Builder
from isthmus.modules.rope import RopeConfig
from isthmus.modules.router import MAX_CHOSEN, MAX_EXPERTS, RouterConfig
from isthmus.weights.source import WeightSource


@dataclass(frozen=True)
class DecoderConfig:
    """What the engine, and the decoder below, ask of any model's config."""

    vocab_size: int
    hidden: int
    layers: int
    context_tokens: int  # the longest context the model was made for
    eps: float  # of every RMS norm


def decoder_keys(keys: Keys) -> dict[str, Any]:
    """The fields of DecoderConfig."""
    return {
        "vocab_size": keys.vocab_size(),
        "hidden": keys.integer("embedding_length"),
        "layers": keys.integer("block_count", at_most=4096),
        "context_tokens": keys.integer("context_length"),
        "eps": keys.number("attention.layer_norm_rms_epsilon"),
    }


class Model(Protocol):
    config: DecoderConfig
    kv_dtype: KvDtype  # of the states it works on

    def forward(self, batch: Batch, state: State) -> Tensor:
        """fp32 [R, vocab]: logits of the rows in batch.logit_rows; writes the batch's rows into `state`."""

    def state_spec(self) -> list[StateKind]:
        """The kind of state of each layer."""


class Layer(Protocol):
    @property
    def state_kind(self) -> StateKind: ...

    def __call__(self, x: Tensor, step: Step, cache: Any) -> Tensor: ...


class Decoder:
    """Embedding, layers, norm, head: what the families have in common. Only the asked rows reach norm and
    head.
    """

    def __init__(self, build: Builder, config: DecoderConfig, layers: Sequence[Layer]) -> None:
        self.config = config
        self.kv_dtype = build.options.kv_dtype
        self.embedding = build.embedding("token_embd.weight", config.vocab_size, config.hidden)
        self.layers = layers
        self.norm = build.norm("output_norm.weight", config.hidden, config.eps)
        head = (
            "output" if build.has("output.weight") else "token_embd"
        )  # tied: one packed tensor, read by both
        self.head = build.linear({head: config.vocab_size}, config.hidden)

    def forward(self, batch: Batch, state: State) -> Tensor:
        if state.kv_dtype != self.kv_dtype:  # native code would write past the caches
            raise ValueError(f"a state of {state.kv_dtype} for a model loaded for {self.kv_dtype}")
        step = batch.prepare(self.config.vocab_size, state.num_blocks)
        x = self.embedding(batch.tokens)
        for layer, cache in zip(self.layers, state.layers, strict=True):
            x = layer(x, step, cache)
        if batch.logit_rows.numel() == 0:  # a chunk inside a prompt
            return x.new_empty(0, self.config.vocab_size)
        return self.head(self.norm(x.index_select(0, batch.logit_rows)))

    def state_spec(self) -> list[StateKind]:
        return [layer.state_kind for layer in self.layers]


def load_model(
    source: WeightSource, options: RunOptions, progress: Callable[[int], None] | None = None
) -> Model:
    """The model that general.architecture names, with its weights packed. `progress` gets the bytes of each
    tensor.
    """
    from isthmus.models.table import model_class

    keys = Keys(source.metadata)
    cls = model_class(keys.architecture)
    build = Builder(source, options, progress)
    model: Model = cls(build, keys)
    build.finish()
    return model


def read_attention(
    keys: Keys,
    *,
    interleaved: bool,
    bias: Literal["none", "required", "optional"] = "none",
    head_norm_eps: float | None = None,
) -> AttentionConfig:
    """The attention.* keys of grouped-query attention, whose heads are hidden / heads wide unless the file
    says more.
    """
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", heads, at_most=heads)
    if heads % kv_heads:
        raise keys.bad("attention.head_count_kv", f"a divisor of attention.head_count = {heads}")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.bad("attention.value_length", f"equal to attention.key_length = {head_dim}")
    return AttentionConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(keys, head_dim, interleaved=interleaved),
        bias=bias,
        head_norm_eps=head_norm_eps,
    )


def read_rope(keys: Keys, head_dim: int, *, interleaved: bool) -> RopeConfig:
    """The rope.* keys, as llama.cpp reads them: without a scaling type a factor means linear."""
    dim = keys.integer("rope.dimension_count", head_dim, at_least=2, at_most=head_dim)
    if dim % 2:
        raise keys.bad("rope.dimension_count", "even")
    base = keys.number("rope.freq_base", 10000.0, at_least=1.0)
    scaling = keys.choice("rope.scaling.type", {"none": "none", "linear": "linear", "yarn": "yarn"}, "linear")
    factor = keys.number("rope.scaling.factor", 1.0, at_least=1.0)
    if scaling != "yarn":
        return RopeConfig(dim, base, interleaved, scaling if factor != 1.0 else "none", factor)
    return RopeConfig(
        dim,
        base,
        interleaved,
        scaling="yarn",
        factor=factor,
        original_tokens=keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=keys.number("rope.scaling.attn_factor", 1.0),
        log_multiplier=keys.number("rope.scaling.yarn_log_multiplier", 0.0),
    )


def read_router(keys: Keys, *, gate: Literal["softmax", "sigmoid"], normalise: bool) -> RouterConfig:
    """The expert_* keys. Without group keys every expert may be chosen, as llama.cpp has it."""
    experts = keys.integer("expert_count", at_most=MAX_EXPERTS)
    top_k = keys.integer("expert_used_count", at_most=min(experts, MAX_CHOSEN))
    groups = keys.integer("expert_group_count", 1, at_most=experts)
    groups_used = keys.integer("expert_group_used_count", groups, at_most=groups)
    if experts % groups:
        raise keys.bad("expert_group_count", f"a divisor of expert_count = {experts}")
    if top_k > groups_used * (experts // groups):
        raise keys.bad("expert_used_count", f"at most the experts of {groups_used} of {groups} groups")
    return RouterConfig(
        gate=gate,
        experts=experts,
        top_k=top_k,
        normalise=keys.flag("expert_weights_norm", normalise),
        scale=keys.number("expert_weights_scale", 1.0),
        groups=groups,
        groups_used=groups_used,
    )
