"""The tiers below the cache, asked in their order: RAM, then disk. What they hold is read by a thread.

A load brings blocks one after the other, the first ones first, and ends at the first that no tier has as it
should be: what is missing is computed. It can be stopped between any two bytes, and then writes nothing more;
so whoever waits for it may leave, and a disk that hangs keeps nothing but its own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Protocol

from torch import Tensor

from isthmus.config import RunOptions
from isthmus.engine.background import Worker
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.devices import gpus_of
from isthmus.engine.kv_blocks import CacheBlocks, CudaBlocks, HostBlocks, Wait, planes_of
from isthmus.engine.kv_ram import KvRam
from isthmus.engine.request import TierStats
from isthmus.engine.runner import Runner
from isthmus.placement.plan import Plan
from isthmus.weights.identity import FileIdentity

# After so long without a block a load is over, and nothing more is asked for until the thread comes back: a
# disk that slept needs up to 10 s to turn again.
STUCK_S = 15.0


class Tier(Protocol):
    """One place where blocks are kept. `read` is called by the reading thread, all others by the loop's."""

    def holds(self, digest: bytes) -> bool: ...
    def touch(self, digests: Sequence[bytes]) -> None: ...
    def known(self, digest: bytes, tokens: Sequence[int], block: int) -> None: ...
    def evicted(self, digest: bytes, tokens: Sequence[int], block: int) -> None: ...
    def drop(self, digest: bytes) -> None: ...

    def read(self, digest: bytes, tokens: Sequence[int], into: Callable[[Tensor], None]) -> bool:
        """Gives a block's bytes to `into`, which begins to copy them; False if they are not the right."""

    def stats(self) -> TierStats: ...
    def close(self) -> None: ...


class Load:
    """Blocks on their way (`isthmus.engine.prefix.Load`)."""

    def __init__(
        self,
        items: Sequence[tuple[bytes, Sequence[int], int]],
        is_stuck: Callable[[], bool],
    ) -> None:
        """items: digest, tokens and block of each."""
        self.items = items
        self.ended: Future[None] = Future()
        self._is_stuck = is_stuck
        self._lock = Lock()
        self._is_stopped = False
        self._count = 0

    @property
    def is_over(self) -> bool:
        return self.ended.done() or self._is_stuck()

    def stop(self) -> int:
        with self._lock:
            self._is_stopped = True
            return self._count

    def write(self, copy: Callable[[], Wait]) -> Wait | None:
        """Begins a copy into a block; None if it was stopped."""
        with self._lock:
            return None if self._is_stopped else copy()

    def arrived(self) -> bool:
        """One more is there; False if it was stopped before."""
        with self._lock:
            self._count += not self._is_stopped
            return not self._is_stopped


class KvTiers:
    """`isthmus.engine.prefix.Tiers` over the blocks of one cache."""

    def __init__(self, blocks: CacheBlocks, tiers: Sequence[Tier], *, stuck_s: float = STUCK_S) -> None:
        self.blocks, self._tiers, self._stuck_s = blocks, tiers, stuck_s
        self._reader = Worker("isthmus-kv-read")
        self._is_closed = False

    @property
    def is_stuck(self) -> bool:
        return self._reader.is_stuck(self._stuck_s)

    def holds(self, digest: bytes) -> bool:
        return any(tier.holds(digest) for tier in self._tiers)

    def touch(self, digests: Sequence[bytes]) -> None:
        for tier in self._tiers:
            tier.touch(digests)

    def known(self, digest: bytes, tokens: Sequence[int], block: int) -> None:
        for tier in self._tiers:
            tier.known(digest, tokens, block)

    def evicted(self, digest: bytes, tokens: Sequence[int], block: int) -> None:
        for tier in self._tiers:
            tier.evicted(digest, tokens, block)

    def drop(self, digest: bytes) -> None:
        for tier in self._tiers:
            tier.drop(digest)

    def load(self, digests: Sequence[bytes], tokens: Sequence[Sequence[int]], blocks: Sequence[int]) -> Load:
        load = Load(list(zip(digests, tokens, blocks, strict=True)), lambda: self.is_stuck)
        self._reader.add(partial(self._read, load))
        return load

    def stats(self) -> tuple[TierStats, ...]:
        return tuple(tier.stats() for tier in self._tiers)

    def close(self) -> None:
        """Nothing more is read; what waits to be written gets a moment."""
        self._is_closed = True
        for tier in self._tiers:
            tier.close()

    def _read(self, load: Load) -> None:
        try:
            for digest, tokens, block in load.items:
                if self._is_closed or not self._bring(load, digest, tokens, block):
                    break
                self._reader.moved()
        finally:
            load.ended.set_result(None)

    def _bring(self, load: Load, digest: bytes, tokens: Sequence[int], block: int) -> bool:
        begun: list[Wait | None] = []

        def into(data: Tensor) -> None:
            begun.append(load.write(lambda: self.blocks.copy_in(data, block)))

        if not any(tier.holds(digest) and tier.read(digest, tokens, into) for tier in self._tiers):
            return False
        (wait,) = begun
        if wait is None:
            return False
        wait()
        return load.arrived()


def tiers_below(
    plan: Plan, options: RunOptions, identity: Sequence[FileIdentity], runner: Runner | DeviceRunner
) -> KvTiers | None:
    """What the options ask for, over the runner's cache; None for nothing.

    identity: of the model's files, where kv_disk is given. Raises UsageError and NotEnoughMemoryError.
    """
    in_ram = options.kv_ram is not None and gpus_of(plan)
    if not in_ram and options.kv_disk is None:
        return None
    blocks, tiers = _blocks_of(runner), list[Tier]()
    if in_ram:
        assert options.kv_ram is not None
        tiers.append(KvRam(blocks, options.kv_ram))
    if options.kv_disk is not None:
        from isthmus.engine.kv_disk import KvDisk, made_from

        kinds = sorted({device.type for device, _ in planes_of(runner.state)})
        origin = made_from(identity, plan.strategy, kinds, options)
        tiers.append(KvDisk(Path(options.kv_disk).expanduser(), origin, blocks, options.kv_disk_size))
    return KvTiers(blocks, tiers)


def _blocks_of(runner: Runner | DeviceRunner) -> CacheBlocks:
    if isinstance(runner, DeviceRunner) and any(place.target.device.type != "cpu" for place in runner.places):
        lanes = {place.target.device: place.lane.here for place in runner.places}
        return CudaBlocks(planes_of(runner.state), lanes)
    return HostBlocks(runner.state)
