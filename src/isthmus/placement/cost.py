"""Bytes: of the weights in memory, of a token in the cache, and those read for one decoded token.

Read from the header's names and sizes alone. Decoding is bound by these bytes: tokens per second are at most
the machine's read bandwidth divided by them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.weights.metadata import Metadata
    from isthmus.weights.source import RawTensor, WeightSource

KV_VALUE_BYTES = {"bf16": 2, "f32": 4}


def loaded_bytes(tensor: RawTensor) -> int:
    """Bytes of a tensor once it is loaded: the file's own, packed in another order, with two exceptions.

    Vectors (norms, biases) and the router are fp32 whatever the file holds. Latent attention multiplies by
    its keys as they are and transposed: k_b, and the key half of a joined kv_b, has a second copy in BF16
    tiles (design 4.7).
    """
    if len(tensor.shape) == 1 or tensor.name.endswith(".ffn_gate_inp.weight"):
        return 4 * prod(tensor.shape)
    if tensor.name.endswith(".attn_kv_b.weight"):
        return tensor.nbytes + 2 * prod(tensor.shape) // 2
    if tensor.name.endswith(".attn_k_b.weight"):
        return tensor.nbytes + 2 * prod(tensor.shape)
    return tensor.nbytes


def decoded_bytes(tensor: RawTensor) -> int:
    """Bytes of a loaded tensor that a decoded token reads: of latent attention's keys one of the copies."""
    if tensor.name.endswith(".attn_kv_b.weight"):
        return tensor.nbytes // 2 + 2 * prod(tensor.shape) // 2
    if tensor.name.endswith(".attn_k_b.weight"):
        return tensor.nbytes
    return loaded_bytes(tensor)


def weight_bytes(source: WeightSource) -> int:
    return sum(loaded_bytes(tensor) for tensor in source.tensors.values())


def decode_weight_bytes(source: WeightSource) -> float:
    """Weight bytes read for one decoded token: of the experts the chosen ones, of an embedding one row."""
    used = source.metadata.int(key(source.metadata, "expert_used_count"), 0, min=0)
    tied = "output.weight" not in source.tensors  # then the embedding is the LM head too and is read in full
    total = 0.0
    for name, tensor in source.tensors.items():
        share = 1.0
        if "_exps." in name:
            share = used / tensor.shape[0]
        elif name == "token_embd.weight" and not tied:
            share = 1 / tensor.shape[0]
        total += share * decoded_bytes(tensor)
    return total


def kv_token_bytes(metadata: Metadata, kv_dtype: str) -> int:
    """Bytes of one token in the cache, over all layers."""
    layers = metadata.int(key(metadata, "block_count"), min=1)
    latent = metadata.int(key(metadata, "attention.kv_lora_rank"), 0, min=0)
    if latent:
        values = layers * (latent + metadata.int(key(metadata, "rope.dimension_count"), min=1))
    else:
        heads = metadata.int(key(metadata, "attention.head_count"), min=1)
        head_dim = metadata.int(key(metadata, "embedding_length"), min=1) // heads
        width = metadata.int(key(metadata, "attention.key_length"), head_dim, min=1)
        width += metadata.int(key(metadata, "attention.value_length"), head_dim, min=1)
        kv_heads = metadata.int_per_layer(key(metadata, "attention.head_count_kv"), layers, heads, min=1)
        values = sum(kv_heads) * width
    return values * KV_VALUE_BYTES[kv_dtype]


def key(metadata: Metadata, name: str) -> str:
    """The key of a model's parameter: it begins with the architecture's name."""
    return f"{metadata.str('general.architecture')}.{name}"
