"""Bytes: of the weights in memory, of a token in the cache, and those read for one decoded token.

Read from the header's names and sizes alone. Decoding is bound by these bytes: tokens per second are at most
the machine's read bandwidth divided by them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from isthmus.formats.kv_cache import KvDtype, row_bytes
from isthmus.formats.spec import AS_Q8_0
from isthmus.weights.mtp import decoder_layers

if TYPE_CHECKING:
    from isthmus.weights.metadata import Metadata
    from isthmus.weights.source import RawTensor, WeightSource

# What the GPU's kernels multiply by as it is; any other format but AS_Q8_0 is dequantised to bf16 there.
GPU_TILES = ("q8_0", "q4_k", "q5_k", "q6_k", "mxfp4")  # whose tiles its kernels read: gpu.tiles.GPU_FORMATS
GPU_FORMATS = (*GPU_TILES, "f32", "f16", "bf16")

PLAIN = ("f32", "f16", "bf16")  # formats that a transposition carries over as they are


def weight_bytes(source: WeightSource, *, exact_batching: bool = False) -> int:
    """Bytes of all weights once they are loaded."""
    return sum(ram_bytes(tensor, source, exact_batching) for tensor in source.tensors.values())


def vector_bytes(source: WeightSource) -> int:
    """Of these, the norms and biases: copied into memory also where a cache holds the matrices."""
    return sum(4 * prod(tensor.shape) for tensor in source.tensors.values() if is_vector(tensor))


def is_vector(tensor: RawTensor) -> bool:
    """A norm, a table or a bias, experts' too: nothing is multiplied by it, and it is fp32 in memory."""
    return len(tensor.shape) == 1 or tensor.name.endswith(".bias")


def decode_weight_bytes(source: WeightSource) -> int:
    """Weight bytes read for one decoded token: of the experts the chosen ones, of an embedding one row."""
    return round(sum(ram_read(tensor, source) for tensor in source.tensors.values()))


def ram_bytes(tensor: RawTensor, source: WeightSource, exact_batching: bool) -> int:
    """The file's own bytes, packed in another order, with three exceptions.

    Vectors (norms, biases) and the router are fp32 whatever the file holds. The keys' projection of latent
    attention is kept twice, as it is and transposed, a quantised one in BF16 (design 4.7); exact_batching
    needs only the form that decodes. A joined kv_b beside its own halves is not loaded.
    """
    layer, _, name = tensor.name.rpartition("attn_")
    if is_vector(tensor) or tensor.name.endswith(".ffn_gate_inp.weight"):
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


def ram_read(tensor: RawTensor, source: WeightSource) -> float:
    """Bytes that the CPU reads of this tensor for one decoded token."""
    if tensor.name.endswith(".attn_k_b.weight"):
        return tensor.nbytes
    return ram_bytes(tensor, source, True) * _read_share(tensor, source)


def _read_share(tensor: RawTensor, source: WeightSource) -> float:
    if "_exps." in tensor.name:
        return source.metadata.int(key(source.metadata, "expert_used_count"), 0, min=0) / tensor.shape[0]
    # A tied embedding is the LM head too and is read in full.
    if tensor.name == "token_embd.weight" and "output.weight" in source.tensors:
        return 1 / tensor.shape[0]
    return 1.0


def _transposed(tensor: RawTensor) -> int:
    return tensor.nbytes if tensor.format.name in PLAIN else 2 * prod(tensor.shape)


def _key_share(metadata: Metadata) -> float:
    """Of the rows of a joined kv_b, those that make keys. Older files give the sizes without _mla."""
    suffix = "_mla" if key(metadata, "attention.key_length_mla") in metadata else ""
    keys = metadata.int(key(metadata, f"attention.key_length{suffix}"), min=1)
    keys -= metadata.int(key(metadata, "rope.dimension_count"), min=1)
    return keys / (keys + metadata.int(key(metadata, f"attention.value_length{suffix}"), min=1))


def gpu_bytes(tensor: RawTensor, source: WeightSource) -> int:
    """The same on a GPU, where what the kernels do not unpack is bf16, and F16 too.

    The halves of kv_b are bf16 whatever the file holds: absorbed into products with a head's queries and
    outputs, their blocks would run along the wrong axis. Of a layer's routed experts all matrices are packed
    or none.
    """
    layer, _, name = tensor.name.rpartition("attn_")
    if is_vector(tensor) or tensor.name.endswith(".ffn_gate_inp.weight"):
        return 4 * prod(tensor.shape)
    if name == "kv_b.weight" and f"{layer}attn_k_b.weight" in source.tensors:
        return 0
    if name in ("k_b.weight", "v_b.weight", "kv_b.weight"):
        return 2 * prod(tensor.shape)
    if tensor.format.name == "f32":
        return tensor.nbytes
    together = _routed_matrices(tensor, source) if "_exps." in tensor.name else [tensor]
    if not all(map(stays_packed, together)):
        return 2 * prod(tensor.shape)
    return q8_0_bytes(tensor) if tensor.format.name in AS_Q8_0 else tensor.nbytes


def stays_packed(tensor: RawTensor) -> bool:
    """Whether a GPU multiplies by the tensor's own bits, or by Q8_0 of the same values; its kernels know no
    scale beside them."""
    return tensor.format.name in (*GPU_FORMATS, *AS_Q8_0) and "scale" not in tensor.aux


def q8_0_bytes(tensor: RawTensor) -> int:
    return prod(tensor.shape) // 32 * 34


def _routed_matrices(tensor: RawTensor, source: WeightSource) -> list[RawTensor]:
    """Gate, up and down of the layer's experts."""
    layer = tensor.name[: tensor.name.index("ffn_")]
    names = [f"{layer}ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")]
    return [source.tensors[name] for name in names if name in source.tensors]


def gpu_read(tensor: RawTensor, source: WeightSource) -> float:
    """Bytes that a GPU reads of this tensor for one decoded token."""
    return gpu_bytes(tensor, source) * _read_share(tensor, source)


def kv_token_bytes(metadata: Metadata, kv_dtype: KvDtype) -> int:
    """Bytes of one token in the cache, over all layers."""
    return sum(kv_layer_bytes(metadata, kv_dtype))


def kv_layer_bytes(metadata: Metadata, kv_dtype: KvDtype) -> list[int]:
    """Of these, each layer's."""
    latent = metadata.int(key(metadata, "attention.kv_lora_rank"), 0, min=0)
    if latent:
        width = latent + metadata.int(key(metadata, "rope.dimension_count"), min=1)
        return [row_bytes(kv_dtype, width)] * decoder_layers(metadata)
    heads = _heads(metadata)
    head_bytes = sum(row_bytes(kv_dtype, width) for width in _head_widths(metadata, heads))
    several = key(metadata, "attention.head_count_kv") in metadata
    kv_heads = _per_layer(metadata, "attention.head_count_kv") if several else heads
    return [count * head_bytes for count in kv_heads]


def attention_widths(metadata: Metadata) -> tuple[int, int]:
    """Multiplications of one row with one token of the cache, over all layers: (decoding, long prompts).

    A head's keys and values; of latent attention the latents themselves, or their expansion.
    """
    heads = _heads(metadata)
    latent = metadata.int(key(metadata, "attention.kv_lora_rank"), 0, min=0)
    if latent:
        rope = metadata.int(key(metadata, "rope.dimension_count"), min=1)
        suffix = "_mla" if key(metadata, "attention.key_length_mla") in metadata else ""
        expanded = metadata.int(key(metadata, f"attention.key_length{suffix}"), min=1)
        expanded += metadata.int(key(metadata, f"attention.value_length{suffix}"), min=1)
        return sum(heads) * (2 * latent + rope), sum(heads) * expanded
    width = sum(heads) * sum(_head_widths(metadata, heads))
    return width, width


def decode_heads(metadata: Metadata) -> tuple[int, int, int, bool]:
    """(query heads, kv heads, width of a value, whether it is a latent) of a decode's attention, at most."""
    heads = max(_heads(metadata))
    latent = metadata.int(key(metadata, "attention.kv_lora_rank"), 0, min=0)
    if latent:
        return heads, 1, latent, True
    several = key(metadata, "attention.head_count_kv") in metadata
    kv_heads = max(1, *_per_layer(metadata, "attention.head_count_kv")) if several else heads
    head_dim = metadata.int(key(metadata, "embedding_length"), min=1) // heads
    return heads, kv_heads, metadata.int(key(metadata, "attention.value_length"), head_dim, min=1), False


def _heads(metadata: Metadata) -> list[int]:
    """Of each layer; none where a layer has no attention, as in hybrids with recurrent ones."""
    heads = _per_layer(metadata, "attention.head_count")
    if not any(heads):
        raise metadata.bad(key(metadata, "attention.head_count"), "an integer of at least 1")
    return heads


def _per_layer(metadata: Metadata, name: str) -> list[int]:
    """Of the layers that compute the next token; an array counts all in the file."""
    every = metadata.int(key(metadata, "block_count"), min=1)
    return metadata.int_per_layer(key(metadata, name), every, min=0)[: decoder_layers(metadata)]


def _head_widths(metadata: Metadata, heads: list[int]) -> tuple[int, int]:
    """Of a head's key and value."""
    head_dim = metadata.int(key(metadata, "embedding_length"), min=1) // max(heads)
    key_width = metadata.int(key(metadata, "attention.key_length"), head_dim, min=1)
    return key_width, metadata.int(key(metadata, "attention.value_length"), head_dim, min=1)


def key(metadata: Metadata, name: str) -> str:
    """The key of a model's parameter: it begins with the architecture's name."""
    return f"{metadata.str('general.architecture')}.{name}"
