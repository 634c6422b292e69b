"""What quantised activations cost a model: KL to the float product of the same bytes (design section 6).

One file holds random blocks of a format, the other the fp32 values that gguf-py reads out of the very same
blocks; both run through the same model with the same routes, so the difference is the products' alone.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType

from models import routing, tiny
from models.steps import load, prompt_of, whole

KL_BOUND = 5e-3
PROMPT = prompt_of(64, tiny.VOCAB, seed=5)

TYPES = [GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.Q4_K, GgmlType.Q6_K]


def blocks_of(key: str, values: np.ndarray, ggml_type: GgmlType) -> np.ndarray:
    """Blocks near `values`; a K-quant, which gguf-py cannot make, gets random ones of the same spread."""
    if ggml_type in (GgmlType.Q4_K, GgmlType.Q6_K):
        return tiny.random_blocks(ggml_type, values.shape, float(values.std()), seed=zlib.crc32(key.encode()))
    return gguf.quants.quantize(values, ggml_type)


def two_files(folder: Path, name: str, ggml_type: GgmlType) -> tuple[Path, Path]:
    """The model in blocks, and in fp32 with those blocks' values."""
    case = tiny.WIDE_CASES[name]
    model = tiny.build(case)
    choose = tiny.matrices_as(ggml_type)
    blocks, floats = {}, {}
    for key, values in tiny.tensors_of(case, model).items():
        kind = choose(key, values)
        data = values if kind == GgmlType.F32 else blocks_of(key, values, kind)
        blocks[key] = (data, kind)
        floats[key] = (values if kind == GgmlType.F32 else gguf.quants.dequantize(data, kind), GgmlType.F32)
    keys = tiny.keys_of(case, model.config)
    return (
        tiny.write_raw(folder / "blocks.gguf", case.arch, keys, blocks),
        tiny.write_raw(folder / "floats.gguf", case.arch, keys, floats),
    )


@pytest.mark.parametrize("ggml_type", TYPES, ids=[t.name for t in TYPES])
@pytest.mark.parametrize("name", tiny.WIDE_CASES)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_kl_to_the_float_product(name: str, ggml_type: GgmlType, exact: bool, tmp_path: Path) -> None:
    blocks, floats = two_files(tmp_path, name, ggml_type)
    reference = load(floats)
    routes = routing.recorded(reference)
    wanted = whole(reference, PROMPT).log_softmax(-1)
    got = whole(routing.replay(load(blocks, exact_batching=exact), routes), PROMPT).log_softmax(-1)
    kl = (wanted.exp() * (wanted - got)).sum(-1)
    print(f"{name} {ggml_type.name}: mean KL {kl.mean():.2e}, worst row {kl.max():.2e}")
    assert kl.mean() <= KL_BOUND
