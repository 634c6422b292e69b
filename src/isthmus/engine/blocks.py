"""Who holds the blocks of the paged cache. A block is BLOCK_TOKENS tokens of every layer.

    free --allocate--> held (by one or more) --free--> free, or kept if its content may be asked for again
    kept --share--> held        kept --allocate, oldest first, when nothing is free--> held, content forgotten

It refuses rather than overcommits: `allocate` gives all blocks asked for or none. It knows nothing about
requests, tokens, tensors or devices; a block is its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class BlockManager:
    """Reference counts over blocks 0..num_blocks-1, and the order in which kept ones are given up."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        # Taken from the end: a block just given back is used again first, while its pages are still warm.
        self._free = list(reversed(range(num_blocks)))
        self._holders = [0] * num_blocks
        self._worth_keeping = [False] * num_blocks
        self._kept: dict[int, None] = {}  # held by nobody, the one whose use is longest ago first
        self.on_forget: Callable[[int], None] = lambda block: None
        self.on_evict: Callable[[int], None] = lambda block: None  # before it: its place is needed

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of which nobody knows the content, or None (and nothing taken) if fewer are free."""
        if count > self.num_free:
            return None
        while len(self._free) < count:
            oldest = next(iter(self._kept))
            self.on_evict(oldest)
            self.forget(oldest)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, block: int) -> None:
        """One holder more of a block that is held or kept."""
        assert self._holders[block] or block in self._kept, f"block {block} is free: its content is gone"
        self._kept.pop(block, None)
        self._holders[block] += 1

    def keep(self, block: int) -> None:
        """The content of a held block may be asked for again: it outlives its holders."""
        assert self._holders[block], f"block {block} is held by nobody"
        self._worth_keeping[block] = True

    def forget(self, block: int) -> None:
        """Nobody will ask for the content of this block again. Calls `on_forget`, if anybody would have."""
        if not self._worth_keeping[block]:
            return
        self._worth_keeping[block] = False
        if block in self._kept:
            del self._kept[block]
            self._free.append(block)
        self.on_forget(block)

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less of each. Given up later: the first of `blocks`, on which the others depend."""
        for block in reversed(blocks):
            assert self._holders[block], f"block {block} given back twice"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._worth_keeping[block]:
                self._kept[block] = None
            else:
                self._free.append(block)


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_tokens)
