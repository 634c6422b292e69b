"""The references under one roof, by the names of `kernels`: torch alone, on any device."""

from isthmus.gpu.plain import batched_f32, product_f32
from isthmus.gpu.reference import embed, experts, ffn, linear
from isthmus.gpu.reference_attention import (
    decode,
    latent_write,
    mla_decode,
    mla_prefill,
    prefill,
    rope_write,
)
from isthmus.gpu.reference_rows import act_mul, rms_norm, route, weighted_sum

__all__ = [
    "act_mul",
    "batched_f32",
    "decode",
    "embed",
    "experts",
    "ffn",
    "latent_write",
    "linear",
    "mla_decode",
    "mla_prefill",
    "prefill",
    "product_f32",
    "rms_norm",
    "rope_write",
    "route",
    "weighted_sum",
]
