"""GGUF files made by hand, byte by byte, so that a test can get any field wrong.

    build([text("general.architecture", "llama")], [tensor("a", [4, 2], F32, 0)], data=bytes(32))

Written from docs/gguf.md alone: it shares nothing with the reader under test.
"""

from __future__ import annotations

import struct

U8, I8, U16, I16, U32, I32, FLOAT32, BOOL, STRING, ARRAY, U64, I64, FLOAT64 = range(13)
F32, F16, Q4_0, Q8_0, Q4_K = 0, 1, 2, 8, 12

ARCHITECTURE = "general.architecture"


def string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def text(key: str | bytes, value: str | bytes) -> bytes:
    return pair(key, STRING, string(value))


def u32(key: str | bytes, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def u16(key: str | bytes, value: int) -> bytes:
    return pair(key, U16, struct.pack("<H", value))


def i32(key: str | bytes, value: int) -> bytes:
    return pair(key, I32, struct.pack("<i", value))


def array(key: str | bytes, kind: int, count: int, payload: bytes) -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", kind, count) + payload)


def tensor(
    name: str | bytes, dims: list[int], type_id: int, offset: int, num_dims: int | None = None
) -> bytes:
    """dims: innermost first, as the file has them."""
    count = len(dims) if num_dims is None else num_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, type_id, offset)


def header(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
) -> bytes:
    pairs = [text(ARCHITECTURE, "llama")] if pairs is None else pairs
    tensors = tensors or []
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)


def build(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    alignment: int = 32,
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
) -> bytes:
    """A header, padded to `alignment`, and `data` behind it."""
    head = header(pairs, tensors, version=version, num_tensors=num_tensors, num_pairs=num_pairs)
    return head + bytes(-len(head) % alignment) + data


def small_model() -> bytes:
    """A valid file with every value type, two tensors and odd lengths: the start of the mutation tests."""
    pairs = [
        text(ARCHITECTURE, "llama"),
        u32("general.alignment", 32),
        pair("a.u8", U8, b"\x07"),
        pair("a.i8", I8, b"\xff"),
        u16("a.u16", 300),
        pair("a.i16", I16, struct.pack("<h", -2)),
        i32("a.i32", -5),
        pair("a.f32", FLOAT32, struct.pack("<f", 0.5)),
        pair("a.bool", BOOL, b"\x01"),
        pair("a.u64", U64, struct.pack("<Q", 1 << 40)),
        pair("a.i64", I64, struct.pack("<q", -(1 << 40))),
        pair("a.f64", FLOAT64, struct.pack("<d", 1e300)),
        array("a.tokens", STRING, 3, string("<s>") + string("") + string("Grüße")),
        array("a.scores", FLOAT32, 2, struct.pack("<2f", 1.0, -1.0)),
        array("a.nested", ARRAY, 2, struct.pack("<IQ2B", U8, 2, 1, 2) + struct.pack("<IQ", U8, 0)),
    ]
    tensors = [tensor("token_embd.weight", [32, 2], Q8_0, 0), tensor("norm.weight", [5], F32, 96)]
    return build(pairs, tensors, bytes(range(68)) + bytes(28) + struct.pack("<5f", 1, 2, 3, 4, 5))
