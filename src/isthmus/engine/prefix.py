"""The prefix cache: which block holds the keys and values of which tokens.

A full block is known by the block before it and its own tokens, so that a chain of them is a prefix from the
first token on. The index is a dict from (name of the block before, the tokens themselves): hashing finds the
place, and the comparison of the tokens decides, so a collision costs time and never gives one request what
belongs to another. Names are never used twice: what followed a forgotten block cannot be reached by way of
one that came later. No torch: blocks are numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from isthmus.engine.blocks import BlockManager

Name = int | str  # of a block's content; the first of a chain follows a salt


class PrefixCache:
    """Names the contents of a BlockManager's blocks. Only who holds a block may name it."""

    def __init__(self, blocks: BlockManager, block_tokens: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._known: dict[tuple[Name, tuple[int, ...]], tuple[int, Name]] = {}  # -> (block, name)
        self._keys: dict[int, tuple[Name, tuple[int, ...]]] = {}  # by block
        self._names = itertools.count()
        blocks.on_forget = self._forgotten

    def match(self, tokens: Sequence[int], salt: str, most: int) -> tuple[list[int], list[Name]]:
        """(blocks, their names) of the longest known prefix of up to `most` full blocks. None is held yet."""
        found: list[int] = []
        names: list[Name] = []
        for index in range(min(most, len(tokens) // self._block_tokens)):
            known = self._known.get(self._key(tokens, index, names, salt))
            if known is None:
                break
            found.append(known[0])
            names.append(known[1])
        return found, names

    def name(
        self, tokens: Sequence[int], salt: str, blocks: Sequence[int], names: list[Name], count: int
    ) -> None:
        """Makes the first `count` blocks of a sequence known; `names` holds those that are, and grows.

        All their tokens are computed. Where another block holds the same already, that one stays the known.
        """
        for index in range(len(names), count):
            key = self._key(tokens, index, names, salt)
            known = self._known.get(key)
            if known is None:
                known = (blocks[index], next(self._names))
                self._known[key] = known
                self._keys[blocks[index]] = key
                self._blocks.keep(blocks[index])
            names.append(known[1])

    def is_known(self, block: int) -> bool:
        return block in self._keys

    def _key(
        self, tokens: Sequence[int], index: int, names: Sequence[Name], salt: str
    ) -> tuple[Name, tuple[int, ...]]:
        before = names[index - 1] if index else salt
        return before, tuple(tokens[index * self._block_tokens : (index + 1) * self._block_tokens])

    def _forgotten(self, block: int) -> None:
        del self._known[self._keys.pop(block)]
