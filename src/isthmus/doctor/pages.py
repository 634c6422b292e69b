"""Huge pages: decoding reads all active weights a token, and small pages cost address look-ups."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.doctor.finding import GIB, Finding, System

_THP = "sys/kernel/mm/transparent_hugepage/enabled"
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
    yield from _pools(system)
    if model_bytes:
        yield _needed(-(-model_bytes // PAGE_BYTES), _whole_pieces(system))


def _pools(system: System) -> Iterator[Finding]:
    """Explicit pages. Weights use none: to touch one beyond a container's limit of them ends the process."""
    for name, size in (("2 MB", PAGE_BYTES), ("1 GB", GIB)):
        pool = f"sys/kernel/mm/hugepages/hugepages-{size >> 10}kB"
        reserved, free = (system.number(f"{pool}/{what}_hugepages") or 0 for what in ("nr", "free"))
        if not reserved:
            continue
        size_gib = f"{reserved * size / GIB:.1f} GiB"
        held = f"{reserved} explicit pages of {name} are reserved ({size_gib}), {free} free"
        unused = free * size > GIB
        text = f"{held}: memory that neither Isthmus nor others' usual memory can take" if unused else held
        clear = f"echo 0 | sudo tee /{pool}/nr_hugepages"
        yield Finding("huge pages", "advice" if unused else "ok", text, clear * unused)


def _needed(pages: int, whole: int | None) -> Finding:
    text = f"all weights of this model are {pages} of 2 MB, taken from free memory as they are loaded"
    if whole is None or whole >= pages:
        return Finding("huge pages", "ok", text)
    text += f", of which {whole} are in one piece now; the kernel makes more while it loads, and slower"
    return Finding("huge pages", "ok", text, "sudo sysctl vm.drop_caches=1 vm.compact_memory=1")


def _whole_pieces(system: System) -> int | None:
    """Free pieces of 2 MB, by /proc/buddyinfo: of each zone, blocks of 2^0, 2^1 .. pages of 4 KB."""
    order, found = 9, None
    for line in system.text("proc/buddyinfo").splitlines():
        counts = line.split()[4:]  # Node 0, zone Normal ..
        if all(count.isdigit() for count in counts):
            found = (found or 0) + sum(int(n) << i for i, n in enumerate(counts[order:]))
    return found
