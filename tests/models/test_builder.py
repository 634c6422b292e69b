"""Loading: what is read, reported and given back, and what is refused before or while it is packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType

from isthmus.config import RunOptions
from isthmus.errors import MalformedFileError, UnsupportedError
from isthmus.models.base import load_model
from isthmus.weights.source import RawTensor, open_weights
from models import tiny
from models.steps import load


class Recorded:
    """A weight source that keeps the names of the tensors given back."""

    def __init__(self, path: Path) -> None:
        self._source = open_weights(path)
        self.path, self.metadata = self._source.path, self._source.metadata
        self.tensors: Mapping[str, RawTensor] = self._source.tensors
        self.released: list[str] = []

    def check(self, name: str) -> None:
        self._source.check(name)

    def release(self, name: str) -> None:
        self.released.append(name)
        self._source.release(name)

    def close(self) -> None:
        self._source.close()


@pytest.mark.parametrize(
    "name", ["llama3-tied", "qwen2moe", "deepseek-v3", "deepseek-v3-both", "deepseek-v2-lite"]
)
def test_every_tensor_is_taken_once_and_given_back(name: str, tmp_path: Path) -> None:
    case = tiny.CASES[name]
    source = Recorded(tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case)))
    taken: list[int] = []
    load_model(source, RunOptions(), taken.append)
    assert sorted(source.released) == sorted(source.tensors)
    assert sum(taken) == sum(len(raw.data) for raw in source.tensors.values())


def file_with(tmp_path: Path, name: str, change: Callable[[np.ndarray], tuple[np.ndarray, GgmlType]]) -> Path:
    """A Q8_0 model in which `change` makes the data and type of the tensor `name` out of its fp32 values."""
    case = tiny.WIDE_CASES["qwen3moe"]
    model = tiny.build(case)
    choose = tiny.matrices_as(GgmlType.Q8_0)
    tensors: dict[str, tuple[Any, GgmlType]] = {}
    for key, values in tiny.tensors_of(case, model).items():
        kind = choose(key, values)
        tensors[key] = change(values) if key == name else (gguf.quants.quantize(values, kind), kind)
    return tiny.write_raw(tmp_path / "tiny.gguf", case.arch, tiny.keys_of(case, model.config), tensors)


def test_a_format_without_a_kernel_is_named_with_its_tensor(tmp_path: Path) -> None:
    name = "blk.1.ffn_up_exps.weight"
    path = file_with(tmp_path, name, lambda v: (np.zeros((*v.shape[:-1], 292), np.uint8), GgmlType.Q8_K))
    with pytest.raises(UnsupportedError, match=r"lack: blk\.1\.ffn_up_exps\.weight \(q8_k holds activations"):
        load(path)


def test_a_quantised_norm_is_refused(tmp_path: Path) -> None:
    def quantised(values: np.ndarray) -> tuple[np.ndarray, GgmlType]:
        return gguf.quants.quantize(values, GgmlType.Q8_0), GgmlType.Q8_0

    path = file_with(tmp_path, "output_norm.weight", quantised)
    with pytest.raises(UnsupportedError, match=r"output_norm\.weight \(q8_0; needed: f32, f16, bf16\)"):
        load(path)


def test_an_infinite_scale_is_found_while_packing(tmp_path: Path) -> None:
    def broken(values: np.ndarray) -> tuple[np.ndarray, GgmlType]:
        blocks = gguf.quants.quantize(values, GgmlType.Q8_0).copy()
        blocks[3, 40, 34:36] = np.array([np.inf], np.float16).view(np.uint8)  # expert 3, row 40, second block
        return blocks, GgmlType.Q8_0

    path = file_with(tmp_path, "blk.0.ffn_gate_exps.weight", broken)
    with pytest.raises(
        MalformedFileError, match=r"tiny\.gguf: tensor blk\.0\.ffn_gate_exps\.weight: .*expert 3"
    ):
        load(path)
