"""Full blocks of the cache on disk: a prompt seen before a restart, or long ago, is read instead of computed.

One file for each block, written once after it became known, named by the digest of all tokens up to its
end. A file holds what it was made from (model, options, the tokens of its block, the digest) beside the keys
and values, and is used only if all of that and a checksum agree; anything else is deleted and computed anew.
The folder holds what users wrote: it is made for this user alone.

The loop only takes and copies; a thread writes and deletes. What comes while too much waits to be written is
left out and counted. Whatever the disk does, requests go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import weakref
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

import msgspec
from torch import Tensor

from isthmus import __version__
from isthmus.config import BLOCK_TOKENS, KV_DISK_QUEUE_BYTES, RunOptions
from isthmus.engine.background import Worker
from isthmus.engine.kv_blocks import CacheBlocks, Wait
from isthmus.engine.request import TierStats
from isthmus.errors import UsageError
from isthmus.weights.identity import FileIdentity

log = logging.getLogger(__name__)

_MAGIC = b"ISTHKV01"
_HEAD = struct.Struct("<8s32s32sIIQ")  # magic, made from, digest, tokens, checksum of the data, its bytes

# For what still waits when the engine ends; the process is given 2 s.
_CLOSING_S = 1.0


def made_from(
    identity: Sequence[FileIdentity], strategy: str, devices: Sequence[str], options: RunOptions
) -> bytes:
    """32 bytes that stand for all that a token's keys and values depend on beside the tokens up to it.

    devices: the types of those that have the layers.
    """
    parts: list[Any] = [__version__, list(identity), strategy, list(devices), options.kv_dtype]
    parts += [options.residual_dtype, options.exact_batching, options.defer_experts, BLOCK_TOKENS]
    return blake2b(msgspec.msgpack.encode(parts), digest_size=32).digest()


class _Waiting(NamedTuple):
    """A block to be written."""

    tokens: Sequence[int]
    data: Tensor
    copied: Wait


class KvDisk:
    """A tier (see kv_tiers) in a folder of at most `limit_bytes`; the longest unused files are deleted."""

    def __init__(
        self,
        folder: Path,
        made_from: bytes,
        blocks: CacheBlocks,
        limit_bytes: int,
        *,
        queue_bytes: int = KV_DISK_QUEUE_BYTES,
    ) -> None:
        """made_from: 32 bytes that stand for all that keys and values depend on beside the tokens.

        UsageError for a folder that cannot be made, or is to hold less than a block.
        """
        if limit_bytes < _HEAD.size + 4 * BLOCK_TOKENS + blocks.block_bytes:
            raise UsageError(
                f"kv_disk_size: {limit_bytes} bytes hold no block of this model's cache, which has "
                f"{blocks.block_bytes}; give more, or leave kv_disk out"
            )
        self._made_from = made_from
        self._blocks, self._limit = blocks, limit_bytes
        self._most_waiting = max(1, queue_bytes // blocks.block_bytes)
        self._folder = folder / made_from.hex()[:32]
        self._lock = Lock()  # over all that follows
        self._waiting: dict[bytes, _Waiting] = {}  # the one being written too
        self._spare: list[Tensor] = []  # memory of those written
        self._num_read = self._num_written = self._num_dropped = self._num_failed = 0
        self._is_full = False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sizes = OrderedDict(self._found())
        except OSError as error:
            raise UsageError(f"kv_disk: {self._folder} cannot be used: {error.strerror}") from error
        self._total = sum(self._sizes.values())
        self._make_room(0)
        self._read_into: Tensor | None = None
        self._writer = Worker("isthmus-kv-write")
        weakref.finalize(self, self._writer.drain, _CLOSING_S)  # at the process's end at the latest

    def holds(self, digest: bytes) -> bool:
        return digest in self._sizes

    def touch(self, digests: Sequence[bytes]) -> None:
        """The beginning of a prompt outlives its end, which is worth nothing without it."""
        with self._lock:
            for digest in reversed(digests):
                if digest in self._sizes:
                    self._sizes.move_to_end(digest)

    def known(self, digest: bytes, tokens: Sequence[int], block: int) -> None:
        """Has a block written, unless it is there. A disk that failed is not written to again."""
        with self._lock:
            if self._is_full or digest in self._sizes or digest in self._waiting:
                return
            if len(self._waiting) >= self._most_waiting:
                self._num_dropped += 1
                return
            data = self._spare.pop() if self._spare else None
        if data is None:
            data = self._blocks.allocate(self._blocks.block_bytes)
        waiting = _Waiting(tokens, data, self._blocks.copy_out(block, data))
        with self._lock:
            self._waiting[digest] = waiting
        self._writer.add(partial(self._write, digest, waiting))

    def evicted(self, digest: bytes, tokens: Sequence[int], block: int) -> None:
        """The last chance of what was left out when it became known."""
        self.known(digest, tokens, block)

    def read(self, digest: bytes, tokens: Sequence[int], into: Callable[[Tensor], None]) -> bool:
        """False, and the file gone, if it is not what was stored for these tokens."""
        if self._read_into is None:
            self._read_into = self._blocks.allocate(self._blocks.block_bytes)
        data = self._read_into
        try:
            with open(self._path(digest), "rb", buffering=0) as file:
                is_right = self._is_right(file, digest, tokens, data)
                with contextlib.suppress(OSError):  # of a disk that may only be read
                    os.utime(file.fileno())
        except OSError as error:
            log.info("kv_disk: %s cannot be read: %s", self._path(digest), error.strerror)
            is_right = False
        with self._lock:
            self._num_read += is_right
            self._num_failed += not is_right
        if is_right:
            into(data)
        else:
            self.drop(digest)
        return is_right

    def drop(self, digest: bytes) -> None:
        """What is kept under this digest is not to be trusted, or not to be kept."""
        with self._lock:
            if not self._forget(digest) and self._waiting.pop(digest, None) is None:
                return
        self._writer.add(partial(self._unlink, digest))

    def stats(self) -> TierStats:
        return TierStats(
            "disk",
            len(self._sizes),
            self._total,
            read=self._num_read,
            written=self._num_written,
            dropped=self._num_dropped,
            failed=self._num_failed,
        )

    def drain(self, seconds: float) -> bool:
        """Waits until all is written and deleted, at most so long."""
        return self._writer.drain(seconds)

    def close(self) -> None:
        """What waits to be written gets a moment."""
        self.drain(_CLOSING_S)

    def _write(self, digest: bytes, waiting: _Waiting) -> None:
        """In the writing thread, as all that follows."""
        try:
            waiting.copied()
            if self._waiting.get(digest) is waiting and not self._is_full:
                self._write_file(digest, waiting)
        except FileNotFoundError:  # another engine has begun in this folder, and tidied it up
            with self._lock:
                self._num_failed += 1
        except OSError as error:
            log.warning("kv_disk: nothing more is kept in %s: %s", self._folder, error.strerror)
            with self._lock:
                self._is_full = True
                self._num_failed += 1
        finally:
            with self._lock:
                if self._waiting.get(digest) is waiting:
                    del self._waiting[digest]
                self._spare.append(waiting.data)

    def _write_file(self, digest: bytes, waiting: _Waiting) -> None:
        data = _view(waiting.data)
        head = self._head(digest, waiting.tokens, zlib.crc32(data))
        size = len(head) + len(data)
        self._make_room(size)
        self._replace(self._path(digest), [head, data])
        with self._lock:
            if self._waiting.get(digest) is waiting:
                self._sizes[digest] = size
                self._total += size
                self._num_written += 1
                return
        self._unlink(digest)  # it was dropped meanwhile

    def _is_right(self, file: BinaryIO, digest: bytes, tokens: Sequence[int], data: Tensor) -> bool:
        """Reads the file's bytes into `data`."""
        body = _view(data)
        head = bytearray(_HEAD.size + 4 * len(tokens))
        if not (_fill(file, memoryview(head)) and _fill(file, body)) or file.read(1):
            return False
        return head == self._head(digest, tokens, zlib.crc32(body))

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.kv"

    def _head(self, digest: bytes, tokens: Sequence[int], checksum: int) -> bytes:
        numbers = (len(tokens), checksum, self._blocks.block_bytes)
        return _HEAD.pack(_MAGIC, self._made_from, digest, *numbers) + array("i", tokens).tobytes()

    def _found(self) -> Iterator[tuple[bytes, int]]:
        """The folder's files, the longest unused first; what a crash has left half written is deleted."""
        entries = []
        for entry in os.scandir(self._folder):
            name, _, kind = entry.name.rpartition(".")
            with contextlib.suppress(ValueError, FileNotFoundError):
                status = entry.stat()
                if kind == "kv" and len(bytes.fromhex(name)) == 32:
                    entries.append((status.st_mtime_ns, bytes.fromhex(name), status.st_size))
                elif kind == "part":
                    os.unlink(entry.path)
        for _, digest, size in sorted(entries):
            yield digest, size

    def _forget(self, digest: bytes) -> bool:
        """Under the lock. Whether there was a file."""
        size = self._sizes.pop(digest, None)
        self._total -= size or 0
        return size is not None

    def _make_room(self, size: int) -> None:
        while True:
            with self._lock:
                if not self._sizes or self._total + size <= self._limit:
                    return
                oldest = next(iter(self._sizes))
                self._forget(oldest)
            self._unlink(oldest)

    def _unlink(self, digest: bytes) -> None:
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    def _replace(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        part = path.with_suffix(f".{os.getpid()}.part")
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(file, "wb") as out:
                out.writelines(pieces)
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


def _view(data: Tensor) -> memoryview:
    return data.numpy().data


def _fill(file: BinaryIO, to: memoryview) -> bool:
    """Whether the file had so many bytes."""
    at = 0
    while at < len(to):
        count = file.readinto(to[at:])  # type: ignore[attr-defined]
        if not count:
            return False
        at += count
    return True
