"""cpu: the CPU is the device of everything."""

from __future__ import annotations

from isthmus.config import BLOCK_TOKENS
from isthmus.errors import NotEnoughMemoryError
from isthmus.placement.layout import GIB, HOST, DevicePlan, ExpertTable, Job, Placement

CPU = "cpu"


def place(job: Job) -> Placement:
    """Raises NotEnoughMemoryError."""
    parts = job.parts
    weights = sum(part.ram_bytes for part in parts.dense)
    own = weights + parts.expert_bytes - job.mapped_bytes
    scratch = job.process_bytes + job.step_bytes + job.below_bytes
    token_bytes = max(1, parts.kv_token_bytes)
    room = job.ram_bytes - own - scratch
    wanted = job.wanted_tokens
    blocks_fit = room // (BLOCK_TOKENS * token_bytes)
    if job.may_shrink and 0 < blocks_fit * BLOCK_TOKENS < wanted:
        wanted = (
            blocks_fit * BLOCK_TOKENS
        )  # a shorter context is better than none; the command line prints it
    one_context = -(-wanted // BLOCK_TOKENS)
    shared = job.shared_blocks(one_context, blocks_fit)
    num_blocks = one_context + shared
    kv_bytes = num_blocks * BLOCK_TOKENS * parts.kv_token_bytes
    if own + kv_bytes + scratch > job.ram_bytes:
        raise _refusal(job, own, kv_bytes, scratch)
    cpu = DevicePlan(
        CPU, (0, parts.layers), weights, 0, kv_bytes, scratch, job.ram_bytes, parts.kv_token_bytes
    )
    host = DevicePlan(HOST, (0, 0), 0, parts.expert_bytes, 0, 0, job.ram_bytes)
    modules = {part.path: CPU for part in parts.dense}
    modules |= {part.path: HOST for part in parts.experts.values()}
    tables = {layer: ExpertTable(CPU, part.count) for layer, part in parts.experts.items()}
    return Placement(
        modules, tables, (cpu, host), num_blocks, room // token_bytes, job.mapped_bytes, shared_blocks=shared
    )


def _refusal(job: Job, own: int, kv_bytes: int, scratch: int) -> NotEnoughMemoryError:
    need = own + kv_bytes + scratch
    remedy = f"a smaller model or quantisation, or {job.to_disk} to run it from disk as far as memory goes"
    if own + scratch < job.ram_bytes:
        remedy = "a shorter context (--ctx)"
    elif job.mapped_bytes:  # it is on the disk already
        remedy = f"{(need - job.ram_bytes) / GIB:.1f} GiB more"
        if own + scratch - job.step_bytes < job.ram_bytes:
            remedy += ", or shorter steps (--chunk)"
    return NotEnoughMemoryError(
        f"not enough memory: the model needs {need / GIB:.1f} GiB (weights {own / GIB:.1f}, cache for "
        f"{job.wanted_tokens} tokens {kv_bytes / GIB:.1f}, working memory {scratch / GIB:.1f}), "
        f"{job.ram_bytes / GIB:.1f} GiB are available; try {remedy}",
        need_bytes=need,
        have_bytes=job.ram_bytes,
    )
