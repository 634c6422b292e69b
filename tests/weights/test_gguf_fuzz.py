"""Damage at random: a changed file opens, or is a ModelFileError. Nothing else, for any change."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

from gguf_builder import small_model
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isthmus.errors import ModelFileError
from isthmus.weights.source import open_weights

MODEL = small_model()
TOP = len(MODEL) - 1
# Values at which lengths, counts and offsets go wrong.
EDGES = [
    0,
    1,
    2,
    31,
    33,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 61,
    1 << 63,
    (1 << 64) - 1,
]


def opens_or_is_refused(content: bytes) -> bool:
    """True if the file opened; then everything it promises must be readable."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(content)
        try:
            source = open_weights(path)
        except ModelFileError:
            return False
        for raw in source.tensors.values():
            rows = len(bytes(raw.data)) // raw.format.row_bytes(raw.shape[-1])
            expected = 1
            for dim in raw.shape[:-1]:
                expected *= dim
            assert rows == expected
        assert repr(dict(source.metadata))
        source.close()
        return True


def test_the_model_itself_opens() -> None:
    assert opens_or_is_refused(MODEL)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, TOP), st.integers(0, 255)), min_size=1, max_size=6))
def test_bytes_changed(changes: list[tuple[int, int]]) -> None:
    content = bytearray(MODEL)
    for place, value in changes:
        content[place] = value
    opens_or_is_refused(bytes(content))


@settings(max_examples=400, deadline=None)
@given(st.integers(0, TOP - 7), st.sampled_from(EDGES), st.sampled_from(["<I", "<Q"]))
@example(16, 1 << 63, "<Q")
def test_numbers_changed_to_edge_values(place: int, value: int, code: str) -> None:
    raw = struct.pack(code, value % (1 << 8 * struct.calcsize(code)))
    opens_or_is_refused(MODEL[:place] + raw + MODEL[place + len(raw) :])


def test_cut_anywhere_it_is_refused() -> None:
    """Every shorter file is refused: only the padding behind the last tensor could be spared, and there is
    none."""
    for length in range(TOP + 1):
        assert not opens_or_is_refused(MODEL[:length]), length


@settings(max_examples=200, deadline=None)
@given(st.integers(0, TOP), st.integers(0, 64), st.binary(max_size=64))
def test_bytes_replaced_by_more_or_fewer(place: int, removed: int, inserted: bytes) -> None:
    opens_or_is_refused(MODEL[:place] + inserted + MODEL[place + removed :])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_anything_behind_the_magic(tail: bytes) -> None:
    opens_or_is_refused(b"GGUF" + struct.pack("<I", 3) + tail)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_at_all(content: bytes) -> None:
    opens_or_is_refused(content)
