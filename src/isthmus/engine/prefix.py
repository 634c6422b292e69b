"""The prefix cache: which block holds the keys and values of which tokens.

A full block is known by the block before it and its own tokens, so that a chain of them is a prefix from the
first token on. The index is a dict from (name of the block before, the tokens themselves): hashing finds the
place, and the comparison of the tokens decides, so a collision costs time and never gives one request what
belongs to another. Names are never used twice: what followed a forgotten block cannot be reached by way of
one that came later.

What a sequence leaves after its last full block is a *tail*, one for each block it may follow. Who goes on
from there, as the next turn of a chat does, takes the tail over: it is written on, so it is nobody else's.
A tier below, such as a disk, may keep full blocks longer. It knows a block by the digest of all tokens up to
its end. No torch: blocks are numbers.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from isthmus.engine.blocks import BlockManager

_DIGEST_BYTES = 32

Name = int | str  # of a block's content; the first of a chain follows a salt


@dataclass
class Prefix:
    """Blocks that hold the first `num_tokens` tokens of a sequence. The last is a tail if it has no name."""

    blocks: list[int] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    num_tokens: int = 0
    below: list[bytes] = field(default_factory=list)  # digests of full blocks after these that a tier holds


class Tier(Protocol):
    """Where full blocks are kept beside the cache itself. Never raises."""

    def holds(self, digest: bytes) -> bool: ...
    def store(self, digest: bytes, tokens: Sequence[int], block: int) -> None: ...
    def fetch(self, digest: bytes, tokens: Sequence[int], block: int) -> bool: ...
    def drop(self, digest: bytes) -> None: ...


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
        self._digests: dict[Name, bytes] = {}  # of known blocks
        self.tier: Tier | None = None
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
        if self.tier is not None:
            found.below = self._held_below(tokens, salt, found, most)
        if found.below:
            return found
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
                known = self._make_known(key, blocks[index])
                if self.tier is not None:
                    self.tier.store(self._digests[known[1]], key[1], blocks[index])
            names.append(known[1])

    def fetch(self, tokens: Sequence[int], salt: str, found: Prefix, blocks: Sequence[int]) -> None:
        """Reads what lies below into `blocks`, which are held, and adds to `found` what was there."""
        for digest, block in zip(found.below, blocks, strict=False):
            key = self._key(tokens, len(found.names), found.names, salt)
            if self.tier is None or not self.tier.fetch(digest, key[1], block):
                return
            found.names.append(self._make_known(key, block)[1])
            found.num_tokens += self._block_tokens

    def distrust(self, blocks: Sequence[int]) -> None:
        """Nobody is to find these blocks any more, below neither."""
        for block in blocks:
            key = self._keys.get(block)
            if key is not None and self.tier is not None:
                self.tier.drop(self._digests[self._known[key][1]])
            self._blocks.forget(block)

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

    def _make_known(self, key: tuple[Name, tuple[int, ...]], block: int) -> tuple[int, Name]:
        known = (block, next(self._names))
        self._known[key] = known
        self._keys[block] = key
        self._digests[known[1]] = self._digest(*key)
        self._blocks.keep(block)
        return known

    def _digest(self, before: Name, tokens: tuple[int, ...]) -> bytes:
        """Of all tokens up to the end of a block. After a forgotten block: one that nobody has."""
        if isinstance(before, str):
            return _digest_after(_digest_of(before), tokens)
        return _digest_after(self._digests.get(before) or os.urandom(_DIGEST_BYTES), tokens)

    def _held_below(self, tokens: Sequence[int], salt: str, found: Prefix, most: int) -> list[bytes]:
        """Digests of the full blocks after `found` that the tier holds, up to token `most`."""
        held: list[bytes] = []
        digest = self._digests[found.names[-1]] if found.names else _digest_of(salt)
        for begin in range(found.num_tokens, most - self._block_tokens + 1, self._block_tokens):
            digest = _digest_after(digest, tokens[begin : begin + self._block_tokens])
            if self.tier is None or not self.tier.holds(digest):
                break
            held.append(digest)
        return held

    def _key(
        self, tokens: Sequence[int], index: int, names: Sequence[Name], salt: str
    ) -> tuple[Name, tuple[int, ...]]:
        before = names[index - 1] if index else salt
        return before, tuple(tokens[index * self._block_tokens : (index + 1) * self._block_tokens])

    def _forgotten(self, block: int) -> None:
        if block in self._before_tail:
            del self._tails[self._before_tail.pop(block)]
        else:
            del self._digests[self._known.pop(self._keys.pop(block))[1]]


def _num_same(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    same = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        same += 1
    return same


def _digest_of(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"salt").digest()


def _digest_after(before: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(before + array("i", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()
