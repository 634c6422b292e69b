"""Blocks that a GPU's cache gave up, kept in host RAM: a prompt that comes again is copied, not computed.

A bound and no more; the longest unused makes room. A block is found by the digest of all tokens up to its
end, and used only if its own tokens are the same, one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

from torch import Tensor

from isthmus.engine.devices import first_line
from isthmus.engine.kv_blocks import CacheBlocks
from isthmus.engine.request import TierStats
from isthmus.errors import NotEnoughMemoryError, UsageError
from isthmus.placement.layout import GIB

# Pinned memory is taken in powers of two, since torch rounds each piece up to one; in pieces, so that the
# last of them wastes little.
_PIECE_BYTES = 256 << 20


class KvRam:
    """A tier (see kv_tiers) of at most `limit_bytes`, taken when it is made."""

    def __init__(self, blocks: CacheBlocks, limit_bytes: int) -> None:
        """UsageError if that holds not one block; NotEnoughMemoryError if it cannot be had."""
        self._blocks = blocks
        self._slots = _slots(blocks, limit_bytes)
        self._free = list(range(len(self._slots)))
        self._held: OrderedDict[bytes, tuple[int, tuple[int, ...]]] = OrderedDict()  # -> (slot, its tokens)
        self._lock = Lock()
        self._num_read = self._num_written = 0

    def holds(self, digest: bytes) -> bool:
        return digest in self._held

    def touch(self, digests: Sequence[bytes]) -> None:
        """The beginning of a prompt outlives its end, which is worth nothing without it."""
        with self._lock:
            for digest in reversed(digests):
                if digest in self._held:
                    self._held.move_to_end(digest)

    def known(self, digest: bytes, tokens: Sequence[int], block: int) -> None:
        """It is in the cache: there is time until it goes."""

    def evicted(self, digest: bytes, tokens: Sequence[int], block: int) -> None:
        """A slot that is written again may still be read: copies are queued in order on each device."""
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
                return
            slot = self._free.pop() if self._free else self._held.popitem(last=False)[1][0]
            self._blocks.copy_out(block, self._slots[slot])
            self._held[digest] = (slot, tuple(tokens))
            self._num_written += 1

    def read(self, digest: bytes, tokens: Sequence[int], into: Callable[[Tensor], None]) -> bool:
        with self._lock:
            slot, held = self._held.get(digest, (0, ()))
            if held != tuple(tokens):
                return False
            into(self._slots[slot])
            self._num_read += 1
            return True

    def drop(self, digest: bytes) -> None:
        with self._lock:
            if digest in self._held:
                self._free.append(self._held.pop(digest)[0])

    def stats(self) -> TierStats:
        held = len(self._held)
        size = held * self._blocks.block_bytes
        return TierStats("ram", held, size, read=self._num_read, written=self._num_written)

    def close(self) -> None:
        """Its memory goes with it."""


def _slots(blocks: CacheBlocks, limit_bytes: int) -> list[Tensor]:
    """uint8 [block_bytes] each."""
    size, left, slots = blocks.block_bytes, limit_bytes, list[Tensor]()
    largest = max(_PIECE_BYTES, 1 << (size - 1).bit_length())
    while (piece := min(largest, 1 << (left.bit_length() - 1) if left else 0)) >= size:
        try:
            memory = blocks.allocate(piece)
        except RuntimeError as error:
            raise NotEnoughMemoryError(
                f"kv_ram: of {limit_bytes / GIB:.1f} GiB of host memory {(limit_bytes - left) / GIB:.1f} "
                f"could be pinned ({first_line(error)}); give less, or raise what may be locked",
                need_bytes=limit_bytes,
                have_bytes=limit_bytes - left,
            ) from error
        slots += memory[: piece // size * size].view(-1, size).unbind()
        left -= piece
    if not slots:
        raise UsageError(
            f"kv_ram: {limit_bytes} bytes hold no block of this model's cache, which has {size}; give at "
            f"least {1 << (size - 1).bit_length()}"
        )
    return slots
