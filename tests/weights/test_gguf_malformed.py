"""Every way a GGUF header can lie, and the error that names it.

Each case is one file with one fault. It must be refused with the error written beside it, before anything of
the file is mapped, and without memory for what the header only claims to hold.
"""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path

import pytest
from gguf_builder import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    F32,
    I32,
    Q4_0,
    Q4_K,
    Q8_0,
    STRING,
    U8,
    U32,
    U64,
    array,
    build,
    header,
    pair,
    string,
    tensor,
    text,
    u32,
)

from isthmus.errors import MalformedFileError, ModelFileError, UnsupportedError
from isthmus.weights import gguf
from isthmus.weights.source import open_weights

TOP = 1 << 63
MAX = (1 << 64) - 1


def one(
    dims: list[int], type_id: int, offset: int = 0, data: bytes = bytes(256), num_dims: int | None = None
) -> bytes:
    """A file with the single tensor 'w'."""
    return build(None, [tensor("w", dims, type_id, offset, num_dims)], data)


def kv(*pairs: bytes) -> bytes:
    return build(list(pairs))


def nested(depth: int) -> bytes:
    """Arrays of one array of one array ..., `depth` of them, around one byte."""
    payload = b"\x00"
    for level in range(depth):
        payload = struct.pack("<IQ", ARRAY if level else U8, 1) + payload
    return pair("deep", ARRAY, payload)


# name: (file, error, what the message must contain)
CASES: dict[str, tuple[bytes, type[ModelFileError], str]] = {
    # the first 24 bytes
    "empty file": (b"", MalformedFileError, "not a GGUF file but an empty file"),
    "two bytes": (b"GG", MalformedFileError, "only 2 bytes long; the download is incomplete"),
    "magic alone": (
        b"GGUF",
        MalformedFileError,
        "the version needs 4 bytes at offset 4, but the file ends at 4",
    ),
    "no counts": (header()[:8], MalformedFileError, "the number of tensors needs 8 bytes at offset 8"),
    "version 0": (build(version=0), UnsupportedError, "GGUF version 0; versions 2 and 3 are read"),
    "version 1": (build(version=1), UnsupportedError, "GGUF version 1 (August 2023) is not read"),
    "version 99": (build(version=99), UnsupportedError, "GGUF version 99; versions 2 and 3 are read"),
    "big-endian": (build(version=0x03000000), UnsupportedError, "a big-endian GGUF file"),
    "2^63 tensors": (
        build(num_tensors=TOP),
        MalformedFileError,
        f"claims {TOP} tensors of at least 33 bytes",
    ),
    "2^63 pairs": (build(num_pairs=TOP), MalformedFileError, f"claims {TOP} key-value pairs"),
    "one tensor too many": (build(num_tensors=1), MalformedFileError, "tensor 0 of 1 has an empty name"),
    "too many tensors for any model": (
        build([], [], bytes(33 << 17) + bytes(64), num_tensors=(1 << 17) + 1),
        MalformedFileError,
        "claims 131073 tensors; at most 131072 are read",
    ),
    # keys
    "empty key": (kv(text("", "x")), MalformedFileError, "key 0 of 1 has an empty name"),
    "key of 2^60 bytes": (
        build([struct.pack("<Q", 1 << 60) + b"abcdefgh"], num_pairs=1),
        MalformedFileError,
        f"key 0 of 1 claims to be {1 << 60} bytes long; at most 65535",
    ),
    "key beyond the file": (
        build([struct.pack("<Q", 500) + b"abcdefgh"], num_pairs=1),
        MalformedFileError,
        "key 0 of 1 needs 500 bytes at offset 32, but the file ends at",
    ),
    "key not UTF-8": (kv(text(b"\xff\xfe", "x")), MalformedFileError, "key 0 of 1 is not UTF-8"),
    "NUL in a key": (kv(text("a\x00b", "x")), MalformedFileError, "key 0 of 1 has a control character"),
    "key twice": (kv(u32("a", 1), u32("a", 2)), MalformedFileError, "key 'a' stands twice"),
    # values
    "value type 13": (
        kv(pair("a", 13, b"")),
        MalformedFileError,
        "key 'a' has value type 13; the types are 0 to 12",
    ),
    "value type 2^31": (
        kv(pair("a", TOP >> 32, b"")),
        MalformedFileError,
        f"key 'a' has value type {1 << 31}",
    ),
    "string of 2^64-1 bytes": (
        kv(pair("a", STRING, struct.pack("<Q", MAX))),
        MalformedFileError,
        f"key 'a' claims to be {MAX} bytes long",
    ),
    "string beyond the file": (
        kv(pair("a", STRING, struct.pack("<Q", 1000) + b"abc")),
        MalformedFileError,
        "key 'a' needs 1000 bytes at offset 45, but the file ends at 64",
    ),
    "string not UTF-8": (kv(text("a", b"\xc3\x28")), MalformedFileError, "key 'a' is not UTF-8"),
    "surrogate in a string": (kv(text("a", b"\xed\xa0\x80")), MalformedFileError, "key 'a' is not UTF-8"),
    "bool of 2": (kv(pair("a", BOOL, b"\x02")), MalformedFileError, "key 'a' has a bool of 2"),
    "value cut off": (header([pair("a", U64, b"\x00" * 7)]), MalformedFileError, "key 'a'"),
    "array of 2^61 u64, whose bytes wrap to 0": (
        kv(array("a", U64, 1 << 61, bytes(64))),
        MalformedFileError,
        f"key 'a' claims {1 << 61} elements of at least 8 bytes",
    ),
    "array of 2^61 strings": (
        kv(array("a", STRING, 1 << 61, bytes(64))),
        MalformedFileError,
        "key 'a' claims",
    ),
    "array element type 255": (kv(array("a", 255, 1, bytes(8))), MalformedFileError, "elements of key 'a'"),
    "array of arrays 1000 deep": (
        kv(nested(1000)),
        MalformedFileError,
        "key 'deep' nests arrays more than 4 deep",
    ),
    "array of 2^60 arrays": (kv(array("a", ARRAY, 1 << 60, bytes(64))), MalformedFileError, "key 'a' claims"),
    "bad string in an array": (
        kv(array("a", STRING, 2, string("ok") + string(b"\xff"))),
        MalformedFileError,
        "element 1 of key 'a' is not UTF-8",
    ),
    "long string in an array": (
        kv(array("a", STRING, 2, string("ok") + struct.pack("<Q", MAX))),
        MalformedFileError,
        f"element 1 of key 'a' needs {MAX} bytes",
    ),
    # alignment
    "alignment 0": (kv(u32("general.alignment", 0)), MalformedFileError, "must be a power of two from 8"),
    "alignment 3": (kv(u32("general.alignment", 3)), MalformedFileError, "to 1048576, got 3"),
    "alignment 48": (kv(u32("general.alignment", 48)), MalformedFileError, "got 48"),
    "alignment 2^31": (kv(u32("general.alignment", 1 << 31)), MalformedFileError, f"got {1 << 31}"),
    "alignment as a string": (
        kv(text("general.alignment", "32")),
        MalformedFileError,
        "must be a UINT32, got STRING",
    ),
    "alignment as u64": (
        kv(pair("general.alignment", U64, struct.pack("<Q", 32))),
        MalformedFileError,
        "must be a UINT32, got UINT64 32",
    ),
    "alignment as an array": (
        kv(array("general.alignment", U32, 1, struct.pack("<I", 32))),
        MalformedFileError,
        "must be a UINT32",
    ),
    # tensors
    "tensor without a name": (
        build(None, [tensor("", [4], F32, 0)], bytes(64)),
        MalformedFileError,
        "tensor 0 of 1 has an empty name",
    ),
    "tensor name of 300 bytes": (
        build(None, [tensor("n" * 300, [4], F32, 0)], bytes(64)),
        MalformedFileError,
        "tensor 0 of 1 claims to be 300 bytes long; at most 256",
    ),
    "tensor twice": (
        build(None, [tensor("w", [4], F32, 0), tensor("w", [4], F32, 32)], bytes(64)),
        MalformedFileError,
        "tensor 'w' stands twice",
    ),
    "0 dimensions": (one([], F32), MalformedFileError, "tensor 'w' has 0 dimensions; 1 to 4 are allowed"),
    "5 dimensions": (one([1] * 5, F32), MalformedFileError, "tensor 'w' has 5 dimensions"),
    "2^31 dimensions": (one([4], F32, num_dims=1 << 31), MalformedFileError, f"has {1 << 31} dimensions"),
    "a dimension of 0": (one([4, 0], F32), MalformedFileError, "has the shape [0, 4]; no dimension may be 0"),
    "a negative dimension": (
        one([MAX], F32),
        MalformedFileError,
        "tensor 'w' (f32, [18446744073709551615]) ends",
    ),
    "dimensions whose product wraps to 0": (
        one([1 << 32, 1 << 32], F32),
        MalformedFileError,
        "tensor 'w' (f32, [4294967296, 4294967296]) ends at byte",
    ),
    "dimensions whose bytes wrap to 16": (
        one([(1 << 62) + 4], F32),
        MalformedFileError,
        "tensor 'w' (f32, [4611686018427387908]) ends at byte",
    ),
    "a row that is no whole number of blocks": (
        one([48, 2], Q4_0),
        MalformedFileError,
        "tensor 'w' has rows of 48 columns; q4_0 needs a multiple of 32",
    ),
    "rows too short though the elements suffice": (
        one([128, 2], Q4_K),
        MalformedFileError,
        "tensor 'w' has rows of 128 columns; q4_k needs a multiple of 256",
    ),
    "a removed type": (
        one([32], 4),
        UnsupportedError,
        "q4_2 was removed from the GGUF format; convert to Q4_0",
    ),
    "a repacked type": (one([32], 33), UnsupportedError, "'w' has type id 33: q4_0_8_8 was removed"),
    "a type beyond the last": (one([32], 43), UnsupportedError, "'w' has type id 43; ids 0 to 42 are known"),
    "ik_llama.cpp's types": (one([256], 137), UnsupportedError, "private to ik_llama.cpp"),
    "type 2^32-1": (one([32], (1 << 32) - 1), UnsupportedError, "has type id 4294967295"),
    # where the data lies
    "offset not aligned": (one([4], F32, 16), MalformedFileError, "has offset 16, not a multiple of 32"),
    "offset beyond the file": (one([4], F32, 4096), MalformedFileError, "tensor 'w' (f32, [4]) ends at byte"),
    "offset that wraps into the file": (
        one([4], F32, MAX - 31),
        MalformedFileError,
        "ends at byte 18446744073709",
    ),
    "cut inside a tensor": (
        one([4, 16], F32)[:-1],
        MalformedFileError,
        "the download is incomplete or damaged",
    ),
    "no data at all": (one([4], F32, data=b""), MalformedFileError, "tensor 'w' (f32, [4]) ends at byte"),
    "two tensors overlap": (
        build(None, [tensor("a", [32, 2], Q8_0, 32), tensor("b", [4], F32, 64)], bytes(256)),
        MalformedFileError,
        "tensor 'b' begins at 64, inside tensor 'a' that ends at 100",
    ),
    "two tensors in one place": (
        build(None, [tensor("a", [4], F32, 0), tensor("b", [4], F32, 0)], bytes(256)),
        MalformedFileError,
        "tensor 'b' begins at 0, inside tensor 'a'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused_by_name_before_anything_is_mapped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, error, message = CASES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    def no_mapping(*args: object, **kwargs: object) -> None:
        raise AssertionError("mapped before the header was found valid")

    monkeypatch.setattr(gguf.mmap, "mmap", no_mapping)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=re.escape(message)) as caught:
            open_weights(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ")
    assert peak_bytes < len(content) + (1 << 20)


def test_the_same_file_without_a_fault_opens(tmp_path: Path) -> None:
    """The cases above fail for their fault and not for something all of them share."""
    path = tmp_path / "model.gguf"
    path.write_bytes(one([4, 16], F32))
    assert open_weights(path).tensors["w"].shape == (16, 4)
    path.write_bytes(build([nested(4), text(ARCHITECTURE, "llama"), array("a", I32, 0, b"")]))
    assert open_weights(path).metadata["deep"] == [[[[0]]]]


def test_header_memory_is_a_small_multiple_of_its_bytes(tmp_path: Path) -> None:
    """Many short strings are the dearest thing a header can hold: 10 bytes become an object of about 60."""
    count = 20_000
    content = kv(array("a", STRING, count, b"".join(string(f"{i % 90 + 10}") for i in range(count))))
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        source = open_weights(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(source.metadata["a"]) == count
    assert peak_bytes < 8 * len(content) + (1 << 20)


def test_more_array_elements_than_any_vocabulary_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.weights.cursor.MAX_ARRAY_ELEMENTS", 1000)
    path = tmp_path / "model.gguf"
    path.write_bytes(kv(array("a", U8, 600, bytes(600)), array("b", U8, 600, bytes(600))))
    with pytest.raises(MalformedFileError, match="key 'b' brings the header's arrays to 1200 elements"):
        open_weights(path)


def test_a_header_larger_than_any_model_s_is_refused(tmp_path: Path) -> None:
    """A sparse file of 300 MB that says it is one string: refused at its length, nothing of it is read."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(header([pair("a", ARRAY, struct.pack("<IQQ", STRING, 1, 290 << 20))]))
        file.truncate(300 << 20)
    with pytest.raises(MalformedFileError, match="beyond the 256 MiB that a header may take"):
        open_weights(path)
