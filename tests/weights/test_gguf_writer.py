"""What the streaming writer writes is what gguf-py reads."""

from __future__ import annotations

import io
from pathlib import Path

import gguf
import numpy as np
import pytest

from isthmus.formats.spec import by_name
from isthmus.weights.gguf_header import ValueType as V
from isthmus.weights.gguf_writer import TensorPlan, write_gguf
from isthmus.weights.source import open_weights

METADATA = {
    "general.architecture": (V.STRING, "llama"),
    "a.u8": (V.UINT8, 7),
    "a.i16": (V.INT16, -2),
    "a.u64": (V.UINT64, 1 << 40),
    "a.f32": (V.FLOAT32, 0.5),
    "a.bool": (V.BOOL, True),
    "a.tokens": (V.STRING, ["<s>", "", "Grüße"]),
    "a.types": (V.INT32, [3, -1]),
    "a.flags": (V.BOOL, [True, False]),
    "a.nothing": (V.FLOAT32, []),
}


def test_gguf_py_and_the_reader_agree_on_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    raw = {"q": rng.integers(0, 256, 3 * 2 * 34, np.uint8), "f": rng.integers(0, 256, 4 * 5, np.uint8)}
    plans = [
        TensorPlan("q", (3, 64), by_name("q8_0"), lambda: [raw["q"].tobytes()[:50], raw["q"].tobytes()[50:]]),
        TensorPlan("f", (5,), by_name("f32"), lambda: [raw["f"].tobytes()]),
    ]
    path = tmp_path / "m.gguf"
    seen: list[tuple[int, int]] = []
    with path.open("wb") as file:
        write_gguf(file, METADATA, plans, lambda done, total: seen.append((done, total)))
    assert seen == [(50, 224), (204, 224), (224, 224)]

    theirs = gguf.GGUFReader(path)
    ours = open_weights(path)
    for key, (_, value) in METADATA.items():
        assert theirs.fields[key].contents() == value
        assert ours.metadata[key] == value
    assert [t.name for t in theirs.tensors] == list(ours.tensors) == ["q", "f"]
    assert [t.shape.tolist() for t in theirs.tensors] == [[64, 3], [5]]
    for tensor in theirs.tensors:
        assert tensor.data.tobytes() == bytes(ours.tensors[tensor.name].data) == raw[tensor.name].tobytes()


def test_a_tensor_that_gives_too_little_is_our_bug(tmp_path: Path) -> None:
    plan = TensorPlan("f", (5,), by_name("f32"), lambda: [bytes(16)])
    with pytest.raises(ValueError, match="tensor f gave 16 bytes instead of 20"):
        write_gguf(io.BytesIO(), {}, [plan])
