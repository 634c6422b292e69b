"""The prefix cache: which block holds the keys and values of which tokens.

A full block is known by the block before it and its own tokens, so that a chain of them is a prefix from the
first token on. The index is a dict from (name of the block before, the tokens themselves): hashing finds the
place, and the comparison of the tokens decides, so a collision costs time and never gives one request what
belongs to another. Names are never used twice: what followed a forgotten block cannot be reached by way of
one that came later.

What a sequence leaves after its last full block is a *tail*, one for each block it may follow. Who goes on
from there, as the next turn of a chat does, takes the tail over: it is written on, so it is nobody else's.
No torch: blocks are numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.engine.blocks import BlockManager

Name = int | str  # of a block's content; the first of a chain follows a salt


@dataclass
class Prefix:
    """Blocks that hold the first `num_tokens` tokens of a sequence. The last is a tail if it has no name."""

    blocks: list[int] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    num_tokens: int = 0


class PrefixCache:
    """Names the contents of a BlockManager's blocks. Only who holds a block may name it."""

    def __init__(self, blocks: BlockManager, block_tokens: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._known: dict[tuple[Name, tuple[int, ...]], tuple[int, Name]] = {}  # -> (block, name)
        self._keys: dict[int, tuple[Name, tuple[int, ...]]] = {}  # by block
        self._tails: dict[Name, tuple[int, tuple[int, ...]]] = {}  # after this block: (block, its tokens)
        self._before_tail: dict[int, Name] = {}  # by block
        self._names = itertools.count()
        blocks.on_forget = self._forgotten

    def match(self, tokens: Sequence[int], salt: str, most: int) -> Prefix:
        """The longest known prefix of up to `most` tokens. Its blocks are not held yet.

        A tail in it is taken over by holding it and forgetting what it was.
        """
        found = Prefix()
        while (len(found.names) + 1) * self._block_tokens <= most:
            known = self._known.get(self._key(tokens, len(found.names), found.names, salt))
            if known is None:
                break
            found.blocks.append(known[0])
            found.names.append(known[1])
        found.num_tokens = len(found.names) * self._block_tokens
        block, held = self._tails.get(found.names[-1] if found.names else salt, (-1, ()))
        same = _num_same(tokens[found.num_tokens : most], held)
        if same:
            found.blocks.append(block)
            found.num_tokens += same
        return found

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

    def leave_tail(
        self, tokens: Sequence[int], salt: str, blocks: Sequence[int], names: Sequence[Name], end: int
    ) -> None:
        """What a sequence that leaves has after its known blocks, up to token `end`, may be taken over.

        It must hold the block alone; an older tail in the same place is forgotten.
        """
        begin = len(names) * self._block_tokens
        if not 0 < end - begin < self._block_tokens:
            return
        before, block = names[-1] if names else salt, blocks[len(names)]
        if before in self._tails:
            self._blocks.forget(self._tails[before][0])
        self._tails[before] = (block, tuple(tokens[begin:end]))
        self._before_tail[block] = before
        self._blocks.keep(block)

    def _key(
        self, tokens: Sequence[int], index: int, names: Sequence[Name], salt: str
    ) -> tuple[Name, tuple[int, ...]]:
        before = names[index - 1] if index else salt
        return before, tuple(tokens[index * self._block_tokens : (index + 1) * self._block_tokens])

    def _forgotten(self, block: int) -> None:
        if block in self._before_tail:
            del self._tails[self._before_tail.pop(block)]
        else:
            del self._known[self._keys.pop(block)]


def _num_same(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    same = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        same += 1
    return same
