"""What the families' configs share: fields, and the readers of the keys that mean the same in all of them.

Every reader holds what it reads against the rest, so that a config that exists can be built and run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from isthmus.models.keys import Keys
from isthmus.modules.attention import AttentionConfig, HeadNorms
from isthmus.modules.rope import RopeConfig
from isthmus.modules.router import RouterConfig
from isthmus.weights.mtp import mtp_layers

# Limits of the row kernels, csrc/rows/args.h: kMaxLatentWidth, kMaxRopeDims, kMaxExperts, kMaxChosen.
MAX_WIDTH = 2048
MAX_ROPE_DIM = 512
MAX_EXPERTS = 1024
MAX_CHOSEN = 64


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
        "layers": keys.integer("block_count", at_most=4096) - len(mtp_layers(keys.metadata)),
        "context_tokens": keys.integer("context_length"),
        "eps": keys.number("attention.layer_norm_rms_epsilon"),
    }


def read_attention(
    keys: Keys,
    *,
    interleaved: bool,
    bias: Literal["none", "required", "optional", "all"] = "none",
    norms: HeadNorms = "none",
) -> AttentionConfig:
    """Grouped-query attention; its heads are hidden / heads wide where the file says no key_length."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", heads, at_most=heads)
    if heads % kv_heads:
        raise keys.bad("attention.head_count_kv", f"a divisor of attention.head_count = {heads}")
    if hidden % heads and not keys.has("attention.key_length"):
        raise keys.bad("attention.head_count", f"a divisor of embedding_length = {hidden}")
    head_dim = keys.integer("attention.key_length", hidden // heads, at_most=MAX_WIDTH)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.bad("attention.value_length", f"equal to attention.key_length = {head_dim}")
    return AttentionConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(keys, head_dim, interleaved=interleaved),
        bias=bias,
        norms=norms,
        eps=keys.number("attention.layer_norm_rms_epsilon"),
    )


def read_rope(keys: Keys, head_dim: int, *, interleaved: bool) -> RopeConfig:
    """The rope.* keys, as llama.cpp reads them: without a scaling type a factor means linear."""
    dim = keys.integer("rope.dimension_count", head_dim, at_least=2, at_most=min(head_dim, MAX_ROPE_DIM))
    if dim % 2:
        raise keys.bad("rope.dimension_count", "even")
    base = keys.number("rope.freq_base", 10000.0, at_least=2.0)
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
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0, at_least=0.01),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0, at_least=0.01),
        attention_factor=keys.number("rope.scaling.attn_factor", 1.0),
        log_multiplier=keys.number("rope.scaling.yarn_log_multiplier", 0.0),
    )


Gate = Literal["softmax", "sigmoid", "softmax_chosen"]
_GATES: dict[int, Gate] = {1: "softmax", 2: "sigmoid"}  # llama.cpp's ids


def read_gate(keys: Keys, default: Gate) -> Gate:
    """How the router's products become scores. 0 is llama.cpp's word for: not set."""
    gate: Gate = keys.choice("expert_gating_func", {0: default} | _GATES, 0)
    return gate


def read_router(keys: Keys, *, gate: Gate, normalise: bool) -> RouterConfig:
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
        scale=keys.number("expert_weights_scale", 1.0) or 1.0,  # llama.cpp reads 0 as: none
        groups=groups,
        groups_used=groups_used,
    )
