"""The plan: what a model takes on this machine, and how long its context may be. Pure.

Made from the file's header, so a model that does not fit is refused before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.config import BLOCK_TOKENS, DEFAULT_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS, RunOptions
from isthmus.errors import NotEnoughMemoryError, UsageError
from isthmus.placement.cost import (
    decode_weight_bytes,
    key,
    kv_token_bytes,
    vector_bytes,
    weight_bytes,
)
from isthmus.placement.machine import Machine

if TYPE_CHECKING:
    from isthmus.weights.metadata import Metadata
    from isthmus.weights.source import WeightSource

GIB = 1 << 30

# The interpreter with torch and the tokenizer's tables: 0.3 to 0.5 GiB resident, whatever the model.
PROCESS_BYTES = GIB // 2


@dataclass(frozen=True)
class Plan:
    """Bytes on the CPU by purpose, and what they allow."""

    context_tokens: int  # of one request
    threads: int
    weight_bytes: int
    mapped_bytes: int  # of these, pages of a packed cache, which the kernel takes back when it needs them
    decode_weight_bytes: int  # of these, read for one decoded token
    kv_token_bytes: int
    num_blocks: int  # of the paged cache, BLOCK_TOKENS each
    scratch_bytes: int  # activations of one step, logits, the process itself
    available_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * BLOCK_TOKENS * self.kv_token_bytes

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes - self.mapped_bytes + self.kv_bytes + self.scratch_bytes


def plan(machine: Machine, source: WeightSource, options: RunOptions, *, mapped: bool = False) -> Plan:
    """The plan for one model; `mapped`: its matrices are read in place from a packed cache.

    Raises NotEnoughMemoryError; UsageError for a context beyond the model's; MalformedFileError for metadata
    that cannot be planned with.
    """
    metadata = source.metadata
    trained = context_length(metadata)
    if options.context_tokens is not None and options.context_tokens > trained:
        raise UsageError(
            f"a context of {options.context_tokens} tokens is asked for; this model's limit is {trained}"
        )
    weights = weight_bytes(source, exact_batching=options.exact_batching)
    in_pages = weights - vector_bytes(source) if mapped else 0
    token_bytes = kv_token_bytes(metadata, options.kv_dtype)
    scratch = PROCESS_BYTES + _step_bytes(metadata, options.chunk_tokens)
    wanted = options.context_tokens or min(trained, DEFAULT_CONTEXT_TOKENS)
    # in blocks
    room = (machine.available_bytes - (weights - in_pages) - scratch) // max(1, BLOCK_TOKENS * token_bytes)
    if options.context_tokens is None and 0 < room * BLOCK_TOKENS < wanted:
        wanted = room * BLOCK_TOKENS  # a shorter context is better than none; the command line prints it
    made = Plan(
        context_tokens=wanted,
        threads=options.threads or machine.cores,
        weight_bytes=weights,
        mapped_bytes=in_pages,
        decode_weight_bytes=decode_weight_bytes(source),
        kv_token_bytes=token_bytes,
        num_blocks=-(-wanted // BLOCK_TOKENS),
        scratch_bytes=scratch,
        available_bytes=machine.available_bytes,
    )
    if made.need_bytes > made.available_bytes:
        raise _refusal(made)
    return made


def context_length(metadata: Metadata) -> int:
    """Tokens the model was trained for."""
    return metadata.int(key(metadata, "context_length"), min=2, max=MAX_CONTEXT_TOKENS)


def _step_bytes(metadata: Metadata, rows: int) -> int:
    """Activations of a step in fp32, from above: 16 of the hidden width, 3 of the chosen experts' width."""

    layers = metadata.int(key(metadata, "block_count"), min=1)

    def count(name: str, default: int = 0) -> int:
        return max(metadata.int_per_layer(key(metadata, name), layers, default, min=0))

    dense = count("feed_forward_length")
    chosen = count("expert_used_count") + count("expert_shared_count")
    inner = max(dense, chosen * count("expert_feed_forward_length", dense))
    vocab = len(metadata.get("tokenizer.ggml.tokens", ()))
    return 4 * rows * (16 * count("embedding_length") + 3 * inner) + 16 * vocab


def _refusal(made: Plan) -> NotEnoughMemoryError:
    need, have = made.need_bytes / GIB, made.available_bytes / GIB
    own = made.weight_bytes - made.mapped_bytes
    weights, cache, working = (n / GIB for n in (own, made.kv_bytes, made.scratch_bytes))
    remedy = "a smaller model or quantisation, or `isthmus pack` to run it from disk as far as memory goes"
    if own + made.scratch_bytes < made.available_bytes:
        remedy = "a shorter context (--ctx)"
    return NotEnoughMemoryError(
        f"not enough memory: the model needs {need:.1f} GiB (weights {weights:.1f}, cache for "
        f"{made.context_tokens} tokens {cache:.1f}, working memory {working:.1f}), {have:.1f} GiB are "
        f"available; try {remedy}",
        need_bytes=made.need_bytes,
        have_bytes=made.available_bytes,
    )
