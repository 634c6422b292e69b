"""The cache on disk: what is read back is what was written, or it is computed anew."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.cache_bytes import BLOCKS, Ram, bits, filled, same
from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine.kv_blocks import HostBlocks
from isthmus.engine.kv_disk import KvDisk, made_from
from isthmus.engine.state import State
from isthmus.errors import UsageError
from isthmus.formats.kv_cache import KvDtype

ORIGIN, DIGEST = bytes(32), bytes(range(32))
TOKENS = tuple(range(BLOCK_TOKENS))


class Disk(KvDisk):
    """Over a state, and waited for after each call: a test sees what there is."""

    def __init__(self, folder: Path, state: State, limit: int = 1 << 20, origin: bytes = ORIGIN) -> None:
        self.over = HostBlocks(state)
        super().__init__(folder, origin, self.over, limit)

    def store(self, digest: bytes, tokens: tuple[int, ...], block: int) -> None:
        self.known(digest, tokens, block)
        assert self.drain(10)

    def fetch(self, digest: bytes, tokens: tuple[int, ...], block: int) -> bool:
        found = self.read(digest, tokens, lambda data: self.over.copy_in(data, block)())
        assert self.drain(10)
        return found


def the_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.kv")
    return path


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8_0"])
def test_a_block_comes_back_in_another_place_of_another_process(tmp_path: Path, kv_dtype: KvDtype) -> None:
    state = filled(kv_dtype=kv_dtype)
    Disk(tmp_path, state).store(DIGEST, TOKENS, 1)
    assert the_file(tmp_path).stat().st_mode & 0o077 == 0  # what users wrote is nobody else's
    later = filled(seed=2, kv_dtype=kv_dtype)
    untouched = bits(later, 0)
    disk = Disk(tmp_path, later)
    assert disk.holds(DIGEST)
    assert disk.fetch(DIGEST, TOKENS, 2)
    assert same(bits(later, 2), bits(state, 1))
    assert same(bits(later, 0), untouched)
    assert (disk.stats().read, disk.stats().num_blocks) == (1, 1)


@pytest.mark.parametrize("at", [0, 8, 40, 100, 150, 400, -1])
def test_a_file_with_one_wrong_bit_is_not_used(tmp_path: Path, at: int) -> None:
    state = filled()
    untouched = bits(state, 2)
    disk = Disk(tmp_path, state)
    disk.store(DIGEST, TOKENS, 1)
    data = bytearray(the_file(tmp_path).read_bytes())
    data[at] ^= 1
    the_file(tmp_path).write_bytes(data)
    assert not disk.fetch(DIGEST, TOKENS, 2)
    assert same(bits(state, 2), untouched)  # nothing wrong stood there at any time
    assert not disk.holds(DIGEST)
    assert not list(tmp_path.rglob("*.kv"))
    assert disk.stats().failed == 1


@pytest.mark.parametrize("spoil", ["tokens", "short", "long", "empty", "gone", "a folder"])
def test_a_file_of_other_tokens_or_another_length_or_gone_is_not_used(tmp_path: Path, spoil: str) -> None:
    disk = Disk(tmp_path, filled())
    disk.store(DIGEST, TOKENS, 1)
    path = the_file(tmp_path)
    if spoil in ("short", "long", "empty"):
        os.truncate(
            path, {"short": path.stat().st_size - 1, "long": path.stat().st_size + 1, "empty": 0}[spoil]
        )
    if spoil in ("gone", "a folder"):
        path.unlink()
    if spoil == "a folder":
        path.mkdir()
    assert not disk.fetch(DIGEST, TOKENS[::-1] if spoil == "tokens" else TOKENS, 2)
    assert not disk.holds(DIGEST)


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    Disk(tmp_path, filled()).store(DIGEST, TOKENS, 1)
    assert not Disk(tmp_path, filled(), origin=bytes([1] * 32)).holds(DIGEST)


def test_a_block_of_another_type_is_not_found_nor_used_where_it_was_put(tmp_path: Path) -> None:
    """What a file was made from includes the cache's type; one that was moved says so, and goes."""
    bf16, q8_0 = (made_from([], "cpu", ["cpu"], RunOptions(kv_dtype=dtype)) for dtype in ("bf16", "q8_0"))
    Disk(tmp_path, filled(), origin=bf16).store(DIGEST, TOKENS, 1)
    state = filled(kv_dtype="q8_0")
    disk, untouched = Disk(tmp_path, state, origin=q8_0), bits(state, 2)
    assert not disk.holds(DIGEST)
    moved = tmp_path / q8_0.hex()[:32] / the_file(tmp_path).name
    the_file(tmp_path).rename(moved)
    disk = Disk(tmp_path, state, origin=q8_0)
    assert disk.holds(DIGEST)
    assert not disk.fetch(DIGEST, TOKENS, 2)
    assert not moved.exists()
    assert same(bits(state, 2), untouched)


def test_the_longest_unused_is_deleted_when_the_folder_is_full(tmp_path: Path) -> None:
    disk = Disk(tmp_path, filled())
    digests = [bytes([n] * 32) for n in range(4)]
    disk.store(digests[0], TOKENS, 0)
    size = the_file(tmp_path).stat().st_size
    disk = Disk(tmp_path, filled(), 3 * size)
    disk.store(digests[1], TOKENS, 0)
    disk.store(digests[2], TOKENS, 0)
    disk.touch(digests[:1])
    disk.store(digests[3], TOKENS, 0)
    assert [disk.holds(digest) for digest in digests] == [True, False, True, True]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) == 3 * size == disk.stats().num_bytes


def refusing(error: int) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return refuse


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("replace", errno.ENOSPC, "No space left on device"),
        ("replace", errno.EIO, "Input/output error"),
        ("open", errno.EROFS, "Read-only file system"),
    ],
)
def test_a_disk_that_fails_ends_writing_not_requests(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    error: int,
    said: str,
) -> None:
    state = filled()
    disk = Disk(tmp_path, state)
    disk.store(DIGEST, TOKENS, 1)
    monkeypatch.setattr(os, call, refusing(error))
    disk.store(bytes([1] * 32), TOKENS, 1)
    disk.store(bytes([2] * 32), TOKENS, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"kv_disk: nothing more is kept in {disk._folder}: {said}"
    ]
    assert len(list(tmp_path.rglob("*.*"))) == 1  # no half of a file
    assert (disk.stats().written, disk.stats().failed) == (1, 1)
    monkeypatch.undo()
    assert disk.fetch(DIGEST, TOKENS, 2)  # what was written before is still read


def test_another_engine_that_begins_while_a_file_is_written_ends_no_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is half written may be left from a crash: it is deleted at a start."""
    disk, replace = Disk(tmp_path, filled()), os.replace

    def late(*paths: Path) -> None:
        Disk(tmp_path, filled())
        replace(*paths)

    monkeypatch.setattr(os, "replace", late)
    disk.store(DIGEST, TOKENS, 1)
    assert (disk.stats().written, disk.stats().failed) == (0, 1)
    monkeypatch.undo()
    disk.store(DIGEST, TOKENS, 1)
    assert disk.fetch(DIGEST, TOKENS, 2)


def test_files_of_a_disk_that_may_only_be_read_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, filled())
    disk.store(DIGEST, TOKENS, 1)
    monkeypatch.setattr(os, "utime", refusing(errno.EROFS))
    assert disk.fetch(DIGEST, TOKENS, 2)


def test_a_file_that_cannot_be_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, filled())
    disk.store(DIGEST, TOKENS, 1)
    monkeypatch.setattr("builtins.open", refusing(errno.EIO))
    assert not disk.fetch(DIGEST, TOKENS, 2)
    assert not disk.holds(DIGEST)


def test_what_comes_while_too_much_waits_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once it is evicted it has another chance. What is copied is what stood there when it was known."""
    state = filled()
    blocks = HostBlocks(state)
    disk = KvDisk(tmp_path, ORIGIN, blocks, 1 << 20, queue_bytes=2 * blocks.block_bytes)
    digests, gate = [bytes([n] * 32) for n in range(3)], threading.Event()
    monkeypatch.setattr(disk, "_make_room", lambda size: gate.wait(10))
    for digest in digests:
        disk.known(digest, TOKENS, 1)
    assert disk.stats().dropped == 1
    was = bits(state, 1)
    for tensor in vars(state.layers[0]).values():
        tensor[1] = 0
    gate.set()
    assert disk.drain(10)
    assert [disk.holds(digest) for digest in digests] == [True, True, False]
    assert disk.read(digests[1], TOKENS, lambda data: blocks.copy_in(data, 2)())
    assert same(bits(state, 2), was)
    disk.evicted(digests[2], TOKENS, 1)
    assert disk.drain(10)
    assert disk.holds(digests[2])


def test_what_is_dropped_while_it_is_written_is_not_there_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = KvDisk(tmp_path, ORIGIN, HostBlocks(filled()), 1 << 20)
    writing, gate, replace = threading.Event(), threading.Event(), os.replace

    def slow(*paths: Path) -> None:
        writing.set()
        assert gate.wait(10)
        replace(*paths)

    monkeypatch.setattr(os, "replace", slow)
    disk.known(DIGEST, TOKENS, 1)
    assert writing.wait(10)
    disk.drop(DIGEST)
    gate.set()
    assert disk.drain(10)
    assert not disk.holds(DIGEST)
    assert not list(tmp_path.rglob("*.*"))


def test_what_waits_is_written_when_the_engine_ends_and_half_files_are_gone_after_a_crash(
    tmp_path: Path,
) -> None:
    disk = KvDisk(tmp_path, ORIGIN, HostBlocks(filled()), 1 << 20)
    disk.known(DIGEST, TOKENS, 1)
    disk.close()
    half = the_file(tmp_path).with_suffix(".123.part")
    half.write_bytes(b"half")
    assert KvDisk(tmp_path, ORIGIN, HostBlocks(filled()), 1 << 20).holds(DIGEST)
    assert not half.exists()


def test_a_folder_that_cannot_be_made_and_one_too_small_for_a_block_are_usage_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"kv_disk: .* cannot be used: Not a directory"):
        Disk(tmp_path / "file", filled())
    with pytest.raises(UsageError, match=r"kv_disk_size: 5000 bytes hold no block .* which has 7168"):
        Disk(tmp_path, filled(), 5000)


moves = st.lists(
    st.tuples(
        st.sampled_from(["known", "known", "read", "read", "drop", "damage", "lose", "restart", "touch"]),
        st.integers(0, 5),
        st.integers(0, BLOCKS - 1),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves, st.integers(1, 4))
def test_whatever_happens_a_block_that_is_read_is_the_one_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, int, int]], room: int
) -> None:
    """Beside the disk a dict: what is read is what stands there, and nothing once it was dropped."""
    folder, state = tmp_path_factory.mktemp("kv"), filled()
    written: dict[bytes, list[torch.Tensor]] = {}
    disk = Disk(folder, state, room * 7700)
    ram = Ram(state)
    for number, (move, name, block) in enumerate(moves):
        digest = bytes([name] * 32)
        if move == "known":
            ram.fill(block, seed=number)
            if not disk.holds(digest):
                written[digest] = bits(state, block)
            disk.store(digest, TOKENS, block)
        elif move == "read" and disk.fetch(digest, TOKENS, block):
            assert same(bits(state, block), written[digest])
        elif move == "drop":
            disk.drop(digest)
            assert not disk.holds(digest)
        elif move == "touch":
            disk.touch([digest])
        elif move == "restart":
            disk.drain(10)
            disk = Disk(folder, state, room * 7700)
        else:
            for path in folder.rglob(f"{digest.hex()}.kv"):
                if move == "lose":
                    path.unlink()
                elif digest in written:  # twice would be none
                    data = path.read_bytes()
                    path.write_bytes(data[: -1 - name % 2] + bytes([data[-1] ^ 1]))
                    written.pop(digest)  # it must not be read: there is nothing to compare it with
        assert disk.drain(10)
        files = list(folder.rglob("*.*"))
        assert sum(path.stat().st_size for path in files) <= room * 7700
        assert disk.stats().num_blocks >= len(files)
