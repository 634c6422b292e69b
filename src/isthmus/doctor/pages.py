"""Huge pages: decoding reads all active weights a token, and small pages cost address look-ups."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.doctor.finding import GIB, Finding, System

_THP = "sys/kernel/mm/transparent_hugepage/enabled"
_POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
PAGE_BYTES = 2 << 20


def check_pages(system: System, model_bytes: int) -> Iterator[Finding]:
    """model_bytes: weights that are to be loaded, 0 where no model was named."""
    text = system.text(_THP)
    mode = text.partition("[")[2].partition("]")[0]
    if mode in ("always", "madvise"):
        yield Finding("huge pages", "ok", f"transparent: {mode}; weights ask for them")
    else:
        why = f"transparent: {mode}" if mode else "this kernel has no transparent ones"
        fix = f"echo madvise | sudo tee /{_THP}" if mode else "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
        yield Finding("huge pages", "advice", f"{why}: reading weights in small pages is slower", fix)
    reserved = system.number(f"{_POOL}/nr_hugepages") or 0
    free = system.number(f"{_POOL}/free_hugepages") or 0
    if reserved:
        size = f"{reserved * PAGE_BYTES / GIB:.1f} GiB"
        held = f"{reserved} explicit pages of 2 MB are reserved ({size}), {free} free"
        unused = free * PAGE_BYTES > GIB and not model_bytes
        text = f"{held}: memory that nothing else can use" if unused else held
        yield Finding(
            "huge pages", "advice" if unused else "ok", text, "sudo sysctl vm.nr_hugepages=0" * unused
        )
    if model_bytes:
        pages = -(-model_bytes // PAGE_BYTES)
        yield Finding(
            "huge pages",
            "ok",
            f"all weights of this model in explicit pages would be {pages} of 2 MB",
            f"sudo sysctl vm.nr_hugepages={pages}" * (reserved < pages),
        )
