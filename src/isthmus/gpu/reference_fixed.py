"""The references under `exact_batching`, by the names of `fixed_kernels`: products row by row."""

from functools import partial

from isthmus.gpu import reference as _reference
from isthmus.gpu.plain import batched_by_row as batched_f32
from isthmus.gpu.plain import product_by_row as product_f32
from isthmus.gpu.reference import embed
from isthmus.gpu.reference_attention import decode, latent_write, mla_decode, rope_write
from isthmus.gpu.reference_rows import act_mul, rms_norm, route, weighted_sum

linear = partial(_reference.linear, fixed=True)
ffn = partial(_reference.ffn, fixed=True)
experts = partial(_reference.experts, fixed=True)

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
    "product_f32",
    "rms_norm",
    "rope_write",
    "route",
    "weighted_sum",
]
