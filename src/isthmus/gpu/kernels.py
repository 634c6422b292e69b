"""Every Triton kernel's wrapper under one roof; `reference_kernels` has the same names. `fixed_kernels` and
`reference_fixed` have those of a run under `exact_batching`."""

from isthmus.gpu.activation import act_mul
from isthmus.gpu.decode import decode, mla_decode
from isthmus.gpu.embedding import embed
from isthmus.gpu.experts import experts, ffn
from isthmus.gpu.linear import linear
from isthmus.gpu.mla import mla_prefill
from isthmus.gpu.plain import batched_f32, product_f32
from isthmus.gpu.prefill import prefill
from isthmus.gpu.rope import latent_write, rope_write
from isthmus.gpu.router import route
from isthmus.gpu.rows import rms_norm, weighted_sum

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
