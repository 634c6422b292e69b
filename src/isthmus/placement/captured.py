"""Which decode steps a GPU captures when a model has been loaded, and what they keep of its memory. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus.config import BLOCK_TOKENS, MAX_CAPTURED_ROWS, RunOptions
from isthmus.placement.sizes import decode_heads, key

if TYPE_CHECKING:
    from isthmus.weights.metadata import Metadata

# Of one graph, whatever its rows: some 2000 nodes of a few KB. An allowance, not a measurement.
GRAPH_BYTES = 16 << 20

# As gpu/decode.py deals a row's keys to programs: from above, where a kv head has several.
_PROGRAMS, _MAX_SPLITS, _LATENT_HEADS = 256, 64, 16


def decode_buckets(options: RunOptions) -> list[int]:
    """Rows of each captured decode: powers of two till all requests fit in; with drafts all there may be."""
    most = MAX_CAPTURED_ROWS if options.speculate != "off" else min(options.parallel, MAX_CAPTURED_ROWS)
    return [1 << i for i in range((most - 1).bit_length() + 1)]


def captured_bytes(metadata: Metadata, options: RunOptions, context_tokens: int) -> int:
    """Of one GPU. The graphs share a pool and the largest is captured first, so what a step computes on the
    way counts once, as of any step; each keeps its indices, the rows it is given, and its logits."""
    buckets = decode_buckets(options)
    hidden = metadata.int(key(metadata, "embedding_length"), min=1)
    vocab = len(metadata.get("tokenizer.ggml.tokens", ()))
    a_row = 4 * (2 * hidden + vocab + -(-context_tokens // BLOCK_TOKENS) + 8)
    return len(buckets) * GRAPH_BYTES + sum(buckets) * a_row


def decode_bytes(metadata: Metadata) -> int:
    """Softmax states of as many decodes as attention takes at a time, captured or not."""
    return MAX_CAPTURED_ROWS * split_bytes(metadata)


def split_bytes(metadata: Metadata) -> int:
    """Of one row's keys in a layer: of each head and split an fp32 sum of values, and two."""
    heads, kv_heads, dim, is_latent = decode_heads(metadata)
    programs = -(-heads // _LATENT_HEADS) if is_latent else kv_heads
    splits = max(1, min(_PROGRAMS // programs, _MAX_SPLITS))
    return 4 * heads * splits * (dim + 2)
