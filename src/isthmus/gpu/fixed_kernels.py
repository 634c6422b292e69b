"""The kernels under `exact_batching`: the names of `kernels`, each one kernel with one tile for every number
of rows, so that a row's bits depend on itself and the weights alone.

What computes chunks of rows in common (`prefill`, `mla_prefill`) is left out: every row is a decode.
"""

from functools import partial

from isthmus.gpu import experts as _experts
from isthmus.gpu import linear as _linear
from isthmus.gpu.activation import act_mul
from isthmus.gpu.decode import decode, mla_decode
from isthmus.gpu.embedding import embed
from isthmus.gpu.fixed import batched_f32, product_f32
from isthmus.gpu.rope import latent_write, rope_write
from isthmus.gpu.router import route
from isthmus.gpu.rows import rms_norm, weighted_sum

linear = partial(_linear.linear, fixed=True)
ffn = partial(_experts.ffn, fixed=True)
experts = partial(_experts.experts, fixed=True)

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
