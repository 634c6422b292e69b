"""Every Triton kernel's wrapper under one roof; `reference_kernels` has the same names."""

from isthmus.gpu.activation import act_mul
from isthmus.gpu.decode import decode, mla_decode
from isthmus.gpu.embedding import embed
from isthmus.gpu.experts import experts, ffn
from isthmus.gpu.linear import linear
from isthmus.gpu.mla import mla_prefill
from isthmus.gpu.prefill import prefill
from isthmus.gpu.rope import latent_write, rope_write
from isthmus.gpu.router import route
from isthmus.gpu.rows import rms_norm, weighted_sum

__all__ = [
    "act_mul",
    "decode",
    "embed",
    "experts",
    "ffn",
    "latent_write",
    "linear",
    "mla_decode",
    "mla_prefill",
    "prefill",
    "rms_norm",
    "rope_write",
    "route",
    "weighted_sum",
]
