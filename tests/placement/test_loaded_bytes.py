"""The plan's weight bytes, read from a header, against what the loader really packs."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from isthmus.config import RunOptions
from isthmus.formats.spec import by_name
from isthmus.models.base import load_model
from isthmus.modules import loader as loader_module
from isthmus.modules.loader import Loader
from isthmus.modules.rope import Rope
from isthmus.native import ops
from isthmus.placement.sizes import gpu_bytes, weight_bytes
from isthmus.weights.source import RawTensor, open_weights
from models import devices, tiny
from models.test_quantised import two_files

NAMES = ["llama3-tied", "mixtral", "qwen2moe", "gpt-oss", "glm4moe", "minimax-m2", "deepseek-v2-lite"]
NAMES += ["deepseek-v3", "deepseek-v3-both"]


@pytest.mark.parametrize("exact", [False, True], ids=["free", "exact"])
@pytest.mark.parametrize("name", NAMES)
def test_the_plan_counts_what_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, exact: bool
) -> None:
    """Split and joined keys of latent attention, shared experts, biases, a tied embedding, a tensor left
    out."""
    case = tiny.CASES[name]
    source = open_weights(tiny.write_case(tmp_path / "model.gguf", case, tiny.build(case)))
    packed, vectors = [], []
    plain_pack, plain_vector = loader_module.pack, Loader.vector

    def pack(raw: RawTensor) -> ops.PackedWeight:
        packed.append(plain_pack(raw))
        return packed[-1]

    def vector(self: Loader, raw: RawTensor) -> Tensor:
        vectors.append(plain_vector(self, raw))
        return vectors[-1]

    monkeypatch.setattr(loader_module, "pack", pack)
    monkeypatch.setattr(Loader, "vector", vector)
    load_model(source, RunOptions(exact_batching=exact))
    loaded = sum(weight.file_nbytes for weight in packed) + sum(values.nbytes for values in vectors)
    assert loaded == weight_bytes(source, exact_batching=exact)


FILES = [
    ("llama3-tied", "Q8_0"),
    ("qwen2moe", "F16"),
    ("qwen3moe", "BF16"),
    ("gpt-oss", "MXFP4"),
    ("glm4moe", "Q8_0"),
    ("minimax-m2", "BF16"),
    ("deepseek-v2-lite", "F32"),
    ("deepseek-v3", "Q8_0"),
    ("deepseek-v3-both", "Q8_0"),
]


@pytest.mark.parametrize(("name", "format_name"), FILES)
def test_the_plan_counts_what_is_on_a_device(tmp_path: Path, name: str, format_name: str) -> None:
    case, kind = tiny.CASES[name], gguf.GGMLQuantizationType[format_name]
    check_device(tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case), tiny.matrices_as(kind)))


@pytest.mark.parametrize(
    "formats", [["q4_k", "q5_1"], ["q4_k", "q6_k", "q5_k"], ["q4_k", "q5_0"]], ids=["mixed", "packed", "q8_0"]
)
def test_the_plan_counts_what_a_device_unpacks(tmp_path: Path, formats: list[str]) -> None:
    check_device(two_files(tmp_path, "qwen3moe", [by_name(format_name) for format_name in formats])[0])


def check_device(path: Path) -> None:
    source = open_weights(path)
    planned = sum(
        gpu_bytes(tensor, source) for tensor in source.tensors.values() if "rope_freqs" not in tensor.name
    )
    assert sum(weights_of(devices.resident(path)).values()) == planned


def weights_of(model: Any) -> dict[int, int]:
    """Address -> bytes of every weight that the model's modules hold: rope's and experts' tables are none."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    left = [model]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor) and one.dtype in (torch.float32, torch.bfloat16, torch.uint8):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        elif type(one).__module__.startswith("isthmus.") and not isinstance(one, Rope):
            left += [value for name, value in vars(one).items() if name != "_tables"]
    return found
