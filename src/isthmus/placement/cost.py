"""Bytes: of the weights in memory, of a token in the cache, and those read for one decoded token.

Read from the header's names and sizes alone. Decoding is bound by these bytes: tokens per second are at most
the machine's read bandwidth divided by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from isthmus.errors import MalformedFileError

if TYPE_CHECKING:
    from isthmus.weights.source import RawTensor, WeightSource

KV_VALUE_BYTES = {"bf16": 2, "f32": 4}


def loaded_bytes(tensor: RawTensor) -> int:
    """Bytes of a tensor once it is loaded: the file's own, packed in another order, with three exceptions.

    Vectors (norms, biases) and the router are fp32 whatever the file holds. A joined kv_b of latent attention
    is kept as per-head BF16 tiles, since one half of it is multiplied transposed (design 4.7).
    """
    if len(tensor.shape) == 1 or tensor.name.endswith(".ffn_gate_inp.weight"):
        return 4 * prod(tensor.shape)
    if tensor.name.endswith(".attn_kv_b.weight"):
        return 2 * prod(tensor.shape)
    return len(tensor.data)


def weight_bytes(source: WeightSource) -> int:
    return sum(loaded_bytes(tensor) for tensor in source.tensors.values())


def decode_weight_bytes(source: WeightSource) -> float:
    """Weight bytes read for one decoded token: of the experts the chosen ones, of an embedding one row."""
    architecture = source.metadata.get("general.architecture")
    used = _int(source.metadata, f"{architecture}.expert_used_count", 0)
    tied = "output.weight" not in source.tensors  # then the embedding is the LM head too and is read in full
    total = 0.0
    for name, tensor in source.tensors.items():
        share = 1.0
        if "_exps." in name:
            share = used / tensor.shape[0]
        elif name == "token_embd.weight" and not tied:
            share = 1 / tensor.shape[0]
        total += share * loaded_bytes(tensor)
    return total


def kv_token_bytes(metadata: Mapping[str, Any], kv_dtype: str) -> int:
    """Bytes of one token in the cache, over all layers."""
    architecture = metadata.get("general.architecture")
    layers = _int(metadata, f"{architecture}.block_count")
    latent = _int(metadata, f"{architecture}.attention.kv_lora_rank", 0)
    if latent:
        values = layers * (latent + _int(metadata, f"{architecture}.rope.dimension_count"))
    else:
        heads = _int(metadata, f"{architecture}.attention.head_count", low=1)
        head_dim = _int(metadata, f"{architecture}.embedding_length") // heads
        keys = _int(metadata, f"{architecture}.attention.key_length", head_dim)
        width = keys + _int(metadata, f"{architecture}.attention.value_length", head_dim)
        values = layers * _int(metadata, f"{architecture}.attention.head_count_kv", heads) * width
    return values * KV_VALUE_BYTES[kv_dtype]


def _int(metadata: Mapping[str, Any], key: str, default: int | None = None, low: int = 0) -> int:
    """A count from the metadata; MalformedFileError names the key if it is missing or absurd."""
    value = metadata.get(key, default)
    if value is None:
        raise MalformedFileError(f"the metadata lacks {key}, needed to plan the model's memory")
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 1 << 40:
        raise MalformedFileError(f"the metadata has {key} = {value!r}; a whole number from {low} is needed")
    return value
