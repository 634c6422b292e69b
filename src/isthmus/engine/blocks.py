"""Which blocks of the paged cache are free. A block is BLOCK_TOKENS tokens of every layer.

It refuses rather than overcommits: `allocate` gives all blocks asked for or none. It knows nothing about
requests, tensors or devices; a block is its number.
"""

from __future__ import annotations


class BlockManager:
    """A free list over blocks 0..num_blocks-1. Every block is either free or held by exactly one caller."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        # Taken from the end: a block just given back is used again first, while its pages are still warm.
        self._free = list(reversed(range(num_blocks)))
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and nothing taken) if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_free[block] = False
        return taken

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            assert not self._is_free[block], f"block {block} given back twice"
            self._is_free[block] = True
        self._free.extend(reversed(blocks))


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_tokens)
