"""Checksums, and files that shrink while mapped: in processes of their own, which SIGBUS would end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from blocks import LAYOUTS, kind_of
from random_weights import random_weight

from isthmus.native import ops

PAGE = 4096


def checksum(data: np.ndarray) -> int:
    return ops.checksum(data.ctypes.data, data.nbytes)


@pytest.mark.parametrize("nbytes", [1, 7, 64, 65, (1 << 20) - 1, (1 << 20) + 3, 3 << 20])
def test_any_flipped_bit_changes_the_checksum(nbytes: int) -> None:
    rng = np.random.default_rng(nbytes)
    data = rng.integers(0, 256, nbytes, dtype=np.uint8)
    whole = checksum(data)
    for at in {0, nbytes - 1, *rng.integers(0, nbytes, 20).tolist()}:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert checksum(data) != whole
            data[at] ^= 1 << bit
    assert checksum(data) == whole
    assert checksum(data[:-1].copy()) != whole


def test_bytes_that_change_places_change_the_checksum() -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 << 20, dtype=np.uint8)
    whole = checksum(data)
    for distance in (1, 8, 64, 128, 1 << 20):
        moved = data.copy()
        moved[:64], moved[distance : distance + 64] = data[distance : distance + 64], data[:64].copy()
        assert checksum(moved) != whole
    flipped = data.copy()
    flipped[[7, 71]] ^= 0x80  # the top bits of two words of one lane
    assert checksum(flipped) != whole


def test_the_checksum_does_not_depend_on_threads() -> None:
    data = np.random.default_rng(2).integers(0, 256, (5 << 20) + 11, dtype=np.uint8)
    before, sums = ops.num_threads(), set()
    for threads in (1, 2, 5):
        ops.set_threads(threads)
        sums.add(checksum(data))
    ops.set_threads(before)
    assert len(sums) == 1


def test_the_layout_tells_formats_of_different_fields_apart() -> None:
    layouts = {name: ops.layout_id(int(kind_of(name))) for name in LAYOUTS}
    assert all(layouts.values())
    assert layouts["f32"] == layouts["bf16"]  # one dword for each of 16 rows
    others = ["f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"]
    assert len({layouts[name] for name in others}) == len(others)
    assert ops.layout_id(63) == 0  # no such format


def test_a_mapped_weight_must_lie_in_its_file(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.write(bytes(PAGE))
        file.flush()
        mapped = ops.MappedFile(file.fileno(), PAGE)
    assert mapped.weight(0, 16 * 64 * 4, 0, 1, 16, 64).nbytes == PAGE
    for offset, nbytes in ((1, PAGE), (-1, 64), (PAGE, 64)):
        with pytest.raises(ValueError, match="are not in a mapping of 4096"):
            mapped.weight(offset, nbytes, 0, 1, 16, 64)
    with pytest.raises(ValueError, match="take 4096 bytes, got 4032"):
        mapped.weight(0, 4032, 0, 1, 16, 64)


@pytest.mark.parametrize("rows", [40, 200])
def test_on_several_nodes_a_mapped_weight_is_split_and_whole_again(tmp_path: Path, rows: int) -> None:
    before = ops.num_threads()
    try:
        ops.set_threads(1, 1)
        whole = random_weight("q8_0", 3, rows, 64, seed=1).packed
        (tmp_path / "file").write_bytes(whole.tiles())
        with open(tmp_path / "file", "rb") as file:
            mapped = ops.MappedFile(file.fileno(), whole.nbytes)
        ops.set_threads(3, 3)
        split = mapped.weight(0, whole.nbytes, whole.format_id, 3, rows, 64)
        assert split.address == 0
        assert split.tiles() == whole.tiles() == bytes(ops.memory(split)) == bytes(ops.memory(whole))
        assert split.unpack() == whole.unpack()
    finally:
        ops.set_threads(before)


SHRINKING = """
import mmap, os, sys
import numpy as np
from isthmus.native import ops
path, watched = sys.argv[1], sys.argv[2] == "watched"
with open(path, "w+b") as file:
    file.write(b"x" * 4096 * 8)
    file.flush()
    memory = mmap.mmap(file.fileno(), 4096 * 8, prot=mmap.PROT_READ)
    watch = ops.watch(memoryview(memory)[100:4096 * 6]) if watched else None
    other = ops.MappedFile(file.fileno(), 4096)
    os.ftruncate(file.fileno(), 4096 * 2)
    print(memory[4096 * 2 - 1], flush=True)
    assert not watch or not watch.lost
    print(memory[4096 * 3], memory[4096 * 6 - 1], watch.lost, other.lost, flush=True)
    if sys.argv[3] == "beyond":
        print(memory[4096 * 7])
"""


def shrink(tmp_path: Path, *how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SHRINKING, tmp_path / "file", *how]
    # Under `make asan` the sanitizer would make a report of the signal.
    environment = os.environ | {"ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":handle_sigbus=0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_the_lost_part_of_a_watched_mapping_reads_as_zeros_and_is_told(tmp_path: Path) -> None:
    done = shrink(tmp_path, "watched", "within")
    assert (done.returncode, done.stdout.split()) == (0, ["120", "0", "0", "True", "False"])


@pytest.mark.parametrize("how", [("unwatched", "within"), ("watched", "beyond")])
def test_a_fault_outside_watched_mappings_is_what_it_was(tmp_path: Path, how: tuple[str, str]) -> None:
    assert shrink(tmp_path, *how).returncode == -signal.SIGBUS
