"""The form of a packed cache: read as it was written, refused if damaged; and its source known again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.errors import MalformedFileError, ModelFileError
from isthmus.weights.identity import FileIdentity, difference, identify
from isthmus.weights.packed_file import Entry, Index, encode_tail, read_index

INDEX = Index(
    [FileIdentity("model.gguf", 1000, 5, "ab" * 16)],
    {"a": Entry(12, 2**63, 8, 32, 256, 4096, 4096, 2**64 - 1), "b": Entry(0, 1, 1, 16, 4, 8192, 256, 0)},
)
TILES_END = 12288


def write(path: Path, change: Callable[[bytearray], None] = lambda data: None) -> Path:
    header, body = encode_tail(INDEX, TILES_END)
    data = bytearray(header.ljust(TILES_END, b"\0") + body)
    change(data)
    path.write_bytes(data)
    return path


def read(path: Path) -> Index:
    with open(path, "rb") as file:
        return read_index(file.fileno(), path)


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read(write(tmp_path / "cache")) == INDEX


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.clear(), "no packed cache"),
        (lambda data: data.__setitem__(0, 0), "no packed cache"),
        (lambda data: data.__setitem__(slice(0, 4), b"GGUF"), "no packed cache"),
        (lambda data: data.__delitem__(slice(30, None)), "header is damaged"),
        (lambda data: data.__setitem__(8, 9), "header is damaged"),
        (lambda data: data.__setitem__(20, 9), "header is damaged"),
        (lambda data: data.pop(), "should have"),
        (lambda data: data.extend(b"x"), "should have"),
        (lambda data: data.__setitem__(-1, data[-1] ^ 1), "index is damaged"),
    ],
)
def test_what_is_damaged_is_refused(
    tmp_path: Path, change: Callable[[bytearray], None], message: str
) -> None:
    path = write(tmp_path / "cache", change)
    with pytest.raises(MalformedFileError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_tensor_outside_the_file_is_refused(tmp_path: Path) -> None:
    header, body = encode_tail(Index([], {"a": Entry(0, 1, 1, 16, 4, 8192, 8192, 0)}), TILES_END)
    (tmp_path / "cache").write_bytes(header.ljust(TILES_END, b"\0") + body)
    with pytest.raises(MalformedFileError, match="tensor a does not lie inside"):
        read(tmp_path / "cache")


def model(path: Path, data: bytes = bytes(range(256)) * 1024) -> Path:
    path.write_bytes(data)
    os.utime(path, ns=(10**18, 10**18))
    return path


HEADER_BYTES = 1000


def test_the_same_file_is_the_same(tmp_path: Path) -> None:
    files = [(model(tmp_path / "model.gguf"), HEADER_BYTES)]
    assert difference(identify(files), identify(files)) is None


@pytest.mark.parametrize("at", [0, HEADER_BYTES - 1, HEADER_BYTES, 256 * 1024 - 1])
def test_other_content_of_the_same_size_and_time_is_another_model(tmp_path: Path, at: int) -> None:
    path = model(tmp_path / "model.gguf")
    before = identify([(path, HEADER_BYTES)])
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    model(path, bytes(data))
    assert difference(before, identify([(path, HEADER_BYTES)])) == "model.gguf is not the file it was"


def test_a_change_of_time_size_or_shards_is_another_model(tmp_path: Path) -> None:
    path = model(tmp_path / "model.gguf")
    before = identify([(path, HEADER_BYTES)])
    os.utime(path, ns=(10**18, 10**18 + 1))
    assert difference(before, identify([(path, HEADER_BYTES)]))
    model(path, path.read_bytes()[:-1])
    assert "had 262144 bytes and now has 262143" in str(difference(before, identify([(path, HEADER_BYTES)])))
    assert "split into 1" in str(difference(before, identify([(path, 1), (path, 1)])))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"gone\.gguf: cannot be read: No such file"):
        identify([(tmp_path / "gone.gguf", 10)])
