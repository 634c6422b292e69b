"""The prefix cache: which block holds the keys and values of which tokens.

A full block is known by the block before it and its own tokens, so that a chain of them is a prefix from the
first token on. The index is a dict from (name of the block before, the tokens themselves): hashing finds the
place, and the comparison of the tokens decides, so a collision costs time and never gives one request what
belongs to another. Names are never used twice: what followed a forgotten block cannot be reached by way of
one that came later.

What a sequence leaves after its last full block is a *tail*, one for each block it may follow. Who goes on
from its end, as the next turn of a chat does, takes the tail over: it is written on, so it is nobody else's.
Who goes another way before the end of a tail or of a full block copies the block and writes on in the copy.
Tiers below, such as a disk, may keep full blocks longer. They know a block by the digest of all tokens up to
its end, and bring it back while others go on. No torch: blocks are numbers.
"""

from __future__ import annotations

import itertools
import os
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from isthmus.engine.blocks import BlockManager

_DIGEST_BYTES = 32

Name = int | str  # of a block's content; the first of a chain follows a salt


@dataclass
class Prefix:
    """Blocks that hold the first `num_tokens` tokens of a sequence. The last is a tail if it has no name.

    source: a block whose first tokens are those after the others', to be copied; they count in `num_tokens`.
    """

    blocks: list[int] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    num_tokens: int = 0
    source: int | None = None
    below: list[bytes] = field(default_factory=list)  # digests of full blocks after these that a tier holds


class Load(Protocol):
    """Blocks on their way from below into blocks of the cache, the first ones first."""

    @property
    def ended(self) -> Future[None]: ...

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come: all is there, some could not be had, or it takes too long."""

    def stop(self) -> int:
        """Nothing is written into the blocks from now on. How many of the first have what was asked for."""


class Tiers(Protocol):
    """Where full blocks are kept beside the cache itself. Never raises, never waits."""

    @property
    def is_stuck(self) -> bool:
        """Whether a load would wait for one that does not answer."""

    def holds(self, digest: bytes) -> bool: ...

    def touch(self, digests: Sequence[bytes]) -> None:
        """They are about to be asked for: others go first when room is needed."""

    def known(self, digest: bytes, tokens: Sequence[int], block: int) -> None:
        """The block has this content, for as long as it is not evicted."""

    def evicted(self, digest: bytes, tokens: Sequence[int], block: int) -> None:
        """The block has this content until the next step, or a load, writes over it."""

    def load(
        self, digests: Sequence[bytes], tokens: Sequence[Sequence[int]], blocks: Sequence[int]
    ) -> Load: ...

    def drop(self, digest: bytes) -> None:
        """What is kept under this digest is not to be trusted."""


class PrefixCache:
    """Names the contents of a BlockManager's blocks. Only who holds a block may name it."""

    def __init__(self, blocks: BlockManager, block_tokens: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._known: dict[tuple[Name, tuple[int, ...]], tuple[int, Name]] = {}  # -> (block, name)
        self._keys: dict[int, tuple[Name, tuple[int, ...]]] = {}  # by block
        self._tails: dict[Name, tuple[int, tuple[int, ...]]] = {}  # after this block: (block, its tokens)
        self._before_tail: dict[int, Name] = {}  # by block
        self._after: dict[Name, list[tuple[int, ...]]] = {}  # the tokens of known blocks after each, sorted
        self._names = itertools.count()
        self._digests: dict[Name, bytes] = {}  # of known blocks
        self.tiers: Tiers | None = None
        blocks.on_forget, blocks.on_evict = self._forgotten, self._evicted

    def match(
        self, tokens: Sequence[int], salt: str, most: int, digests: list[bytes] | None = None
    ) -> Prefix:
        """The longest known prefix of up to `most` tokens. Its blocks, and its source, are not held yet.

        A tail in it is taken over by holding it and forgetting what it was. digests: of the first blocks of
        these tokens, as far as earlier calls have needed them; it grows.
        """
        found = Prefix()
        while (len(found.names) + 1) * self._block_tokens <= most:
            known = self._known.get(self._key(tokens, len(found.names), found.names, salt))
            if known is None:
                break
            found.blocks.append(known[0])
            found.names.append(known[1])
        found.num_tokens = len(found.names) * self._block_tokens
        if self.tiers is not None and not self.tiers.is_stuck:
            digests = [] if digests is None else digests
            found.below = self._held_below(self.tiers, tokens, salt, len(found.names), most, digests)
        if found.below:
            return found
        self._match_part(
            found, salt, tokens[found.num_tokens : min(most, found.num_tokens + self._block_tokens)]
        )
        return found

    def _match_part(self, found: Prefix, salt: str, rest: Sequence[int]) -> None:
        """Adds the longest part of a block that begins as `rest`."""
        before = found.names[-1] if found.names else salt
        tail, held = self._tails.get(before, (-1, ()))
        same_tail, (block, same) = _num_same(rest, held), self._closest(before, tuple(rest))
        if max(same_tail, same) == 0:
            return
        if same_tail == len(held) >= same:
            found.blocks.append(tail)
        else:
            found.source = block if same >= same_tail else tail
        found.num_tokens += max(same_tail, same)

    def _closest(self, before: Name, rest: tuple[int, ...]) -> tuple[int, int]:
        """Of the known blocks after one the one with the longest beginning of `rest`, and its length.

        In sorted order it stands beside the place of `rest`.
        """
        after = self._after.get(before, [])
        at = bisect_left(after, rest)
        near = [(_num_same(rest, tokens), tokens) for tokens in after[max(0, at - 1) : at + 1]]
        same, tokens = max(near, default=(0, ()))
        return (self._known[before, tokens][0], same) if same else (-1, 0)

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
                if self.tiers is not None:
                    self.tiers.known(self._digests[known[1]], key[1], blocks[index])
            names.append(known[1])

    def load(self, tokens: Sequence[int], found: Prefix, blocks: Sequence[int]) -> Load:
        """Begins to read what lies below into the first of `blocks`, which stay held until `landed`."""
        assert self.tiers is not None
        size, count = self._block_tokens, len(found.below)
        begins = range(found.num_tokens, found.num_tokens + count * size, size)
        parts = [tuple(tokens[begin : begin + size]) for begin in begins]
        return self.tiers.load(found.below, parts, blocks[:count])

    def landed(
        self,
        tokens: Sequence[int],
        salt: str,
        below: Sequence[bytes],
        blocks: Sequence[int],
        names: list[Name],
    ) -> None:
        """Makes blocks known that were read from below, after those of `names`, which grows.

        Not those that were dropped there meanwhile, nor what follows them.
        """
        for digest in below:
            if self.tiers is None or not self.tiers.holds(digest):
                return
            key = self._key(tokens, len(names), names, salt)
            known = self._known.get(key) or self._make_known(key, blocks[len(names)])
            names.append(known[1])

    def distrust(self, blocks: Sequence[int]) -> None:
        """Nobody is to find these blocks any more, below neither."""
        for block in blocks:
            key = self._keys.get(block)
            if key is not None and self.tiers is not None:
                self.tiers.drop(self._digests[self._known[key][1]])
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
        insort(self._after.setdefault(key[0], []), key[1])
        self._digests[known[1]] = self._digest(*key)
        self._blocks.keep(block)
        return known

    def _digest(self, before: Name, tokens: tuple[int, ...]) -> bytes:
        """Of all tokens up to the end of a block. After a forgotten block: one that nobody has."""
        if isinstance(before, str):
            return _digest_after(_digest_of(before), tokens)
        return _digest_after(self._digests.get(before) or os.urandom(_DIGEST_BYTES), tokens)

    def _held_below(
        self, tiers: Tiers, tokens: Sequence[int], salt: str, first: int, most: int, digests: list[bytes]
    ) -> list[bytes]:
        """Digests of the full blocks from the `first` on that tiers hold, up to token `most`."""
        size, end = self._block_tokens, first
        while (end + 1) * size <= most:
            while len(digests) <= end:
                begin = len(digests) * size
                before = digests[-1] if digests else _digest_of(salt)
                digests.append(_digest_after(before, tokens[begin : begin + size]))
            if not tiers.holds(digests[end]):
                break
            end += 1
        tiers.touch(digests[first:end])
        return digests[first:end]

    def _key(
        self, tokens: Sequence[int], index: int, names: Sequence[Name], salt: str
    ) -> tuple[Name, tuple[int, ...]]:
        before = names[index - 1] if index else salt
        return before, tuple(tokens[index * self._block_tokens : (index + 1) * self._block_tokens])

    def _evicted(self, block: int) -> None:
        key = self._keys.get(block)
        if key is not None and self.tiers is not None:
            self.tiers.evicted(self._digests[self._known[key][1]], key[1], block)

    def _forgotten(self, block: int) -> None:
        if block in self._before_tail:
            del self._tails[self._before_tail.pop(block)]
        else:
            before, tokens = key = self._keys.pop(block)
            del self._digests[self._known.pop(key)[1]]
            after = self._after[before]
            del after[bisect_left(after, tokens)]
            if not after:
                del self._after[before]


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
