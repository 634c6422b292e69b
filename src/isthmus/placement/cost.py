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
PLAIN = ("f32", "f16", "bf16")  # formats that a transposition carries over as they are


def weight_bytes(source: WeightSource, *, exact_batching: bool = False) -> int:
    """Bytes of all weights once they are loaded."""
    return sum(_loaded(tensor, source, exact_batching) for tensor in source.tensors.values())


def vector_bytes(source: WeightSource) -> int:
    """Of these, the norms and biases: copied into memory also where a cache holds the matrices."""
    return sum(4 * prod(tensor.shape) for tensor in source.tensors.values() if len(tensor.shape) == 1)


def decode_weight_bytes(source: WeightSource) -> int:
    """Weight bytes read for one decoded token: of the experts the chosen ones, of an embedding one row."""
    return round(sum(_decoded(tensor, source) for tensor in source.tensors.values()))


def _loaded(tensor: RawTensor, source: WeightSource, exact_batching: bool) -> int:
    """The file's own bytes, packed in another order, with three exceptions.

    Vectors (norms, biases) and the router are fp32 whatever the file holds. The keys' projection of latent
    attention is kept twice, as it is and transposed, a quantised one in BF16 (design 4.7); exact_batching
    needs only the form that decodes. A joined kv_b beside its own halves is not loaded.
    """
    layer, _, name = tensor.name.rpartition("attn_")
    if len(tensor.shape) == 1 or tensor.name.endswith(".ffn_gate_inp.weight"):
        return 4 * prod(tensor.shape)
    if name == "k_b.weight":
        return tensor.nbytes + (0 if exact_batching else _transposed(tensor))
    if name == "kv_b.weight":
        if f"{layer}attn_k_b.weight" in source.tensors:
            return 0
        keys = _key_share(source.metadata)
        once = (1 - keys if exact_batching else 1) * tensor.nbytes
        return round(once + keys * _transposed(tensor))
    return tensor.nbytes


def _decoded(tensor: RawTensor, source: WeightSource) -> float:
    if "_exps." in tensor.name:
        used = source.metadata.int(key(source.metadata, "expert_used_count"), 0, min=0)
        return used / tensor.shape[0] * tensor.nbytes
    # A tied embedding is the LM head too and is read in full.
    if tensor.name == "token_embd.weight" and "output.weight" in source.tensors:
        return tensor.nbytes / tensor.shape[0]
    if tensor.name.endswith(".attn_k_b.weight"):
        return tensor.nbytes
    return _loaded(tensor, source, exact_batching=True)


def _transposed(tensor: RawTensor) -> int:
    return tensor.nbytes if tensor.format.name in PLAIN else 2 * prod(tensor.shape)


def _key_share(metadata: Metadata) -> float:
    """Of the rows of a joined kv_b, those that make keys. Older files give the sizes without _mla."""
    suffix = "_mla" if key(metadata, "attention.key_length_mla") in metadata else ""
    keys = metadata.int(key(metadata, f"attention.key_length{suffix}"), min=1)
    keys -= metadata.int(key(metadata, "rope.dimension_count"), min=1)
    return keys / (keys + metadata.int(key(metadata, f"attention.value_length{suffix}"), min=1))


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
