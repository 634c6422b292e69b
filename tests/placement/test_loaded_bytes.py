"""The plan's weight bytes, read from a header, against what the loader really packs."""

from pathlib import Path

import pytest
from torch import Tensor

from isthmus.config import RunOptions
from isthmus.models.base import load_model
from isthmus.modules import loader as loader_module
from isthmus.modules.loader import Loader
from isthmus.native import ops
from isthmus.placement.sizes import weight_bytes
from isthmus.weights.source import RawTensor, open_weights
from models import tiny


@pytest.mark.parametrize("exact", [False, True], ids=["free", "exact"])
@pytest.mark.parametrize(
    "name", ["llama3-tied", "mixtral", "qwen2moe", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-both"]
)
def test_the_plan_counts_what_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, exact: bool
) -> None:
    """Split and joined keys of latent attention, shared experts, a tied embedding, a tensor left out."""
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
