"""What fast products cost a model: KL to the float product of the same bytes (design section 6).

One file holds random blocks of a format, the other the fp32 values that gguf-py reads out of the very same
blocks; both run through the same model with the same routes, so the difference is the products' alone. Every
format that the table calls runnable is tested, with the random blocks that dummy models are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from isthmus import native
from isthmus.formats.reference import dequantize
from isthmus.formats.spec import FORMATS, FormatSpec, by_name
from isthmus.weights.random_blocks import BLOCKS
from models import routing, tiny
from models.steps import load, prompt_of, whole

KL_BOUND = 5e-3
PROMPT = prompt_of(64, tiny.VOCAB, seed=5)
RUNNABLE = [spec.name for spec in FORMATS.values() if spec.runnable and spec.name not in ("f32", "f16")]
# MLA multiplies by slices and transposes of its matrices: once for each block size and kind of product.
CASES = [("qwen3moe", name) for name in RUNNABLE]
CASES += [("deepseek-v3", name) for name in ("bf16", "q8_0", "q4_0", "q4_k", "q6_k")]
# exact batching -> the instruction sets whose bits differ: the GEMM of a matrix unit is a driver of its own.
VECTORS = [isa for isa in native.isa_names() if isa != "amx"][-1]
DRIVERS = {True: [VECTORS], False: [VECTORS, *(isa for isa in native.isa_names() if isa == "amx")]}


def values_of(spec: FormatSpec, data: np.ndarray) -> np.ndarray:
    """gguf-py's, or the reference's where gguf-py does not know the format."""
    if spec.name in ("q1_0", "q2_0"):
        return dequantize(spec, data)
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(spec.ggml_id)).reshape(-1)


@cache
def model_of(name: str) -> tuple[tiny.Tensors, dict[str, Any]]:
    """Tensors and metadata of a random model."""
    case = tiny.WIDE_CASES[name]
    model = tiny.build(case)
    return tiny.tensors_of(case, model), tiny.keys_of(case, model.config)


def two_files(folder: Path, name: str, specs: Sequence[FormatSpec]) -> tuple[Path, Path]:
    """The model in blocks, its matrices in the formats by turns, and in fp32 with those blocks' values."""
    case = tiny.WIDE_CASES[name]
    tensors, keys = model_of(name)
    rng = np.random.default_rng(1)
    blocks, floats = {}, {}
    turn = cycle(specs)
    for key, values in tensors.items():
        blocks[key] = floats[key] = tiny.Stored(by_name("f32"), values.shape, values)
        if values.ndim > 1 and "ffn_gate_inp" not in key:  # vectors and the router stay as they are
            spec = next(turn)
            data = BLOCKS[spec.name](rng, values.size // spec.block_columns, float(values.std()))
            blocks[key] = tiny.Stored(spec, values.shape, data)
            floats[key] = tiny.Stored(by_name("f32"), values.shape, values_of(spec, data))
    return (
        tiny.write_stored(folder / "blocks.gguf", case.arch, keys, blocks),
        tiny.write_stored(folder / "floats.gguf", case.arch, keys, floats),
    )


@pytest.mark.parametrize(("name", "format_name"), CASES)
def test_kl_to_the_float_product(name: str, format_name: str, tmp_path: Path) -> None:
    check_kl(*two_files(tmp_path, name, [by_name(format_name)]), f"{name} {format_name}")


def test_every_matrix_may_have_another_format(tmp_path: Path) -> None:
    """As in files of dynamic quantisation: q, k and v differ, gate, up and down differ, layers differ."""
    specs = [by_name(format_name) for format_name in RUNNABLE]
    check_kl(*two_files(tmp_path, "qwen3moe", specs), "mixed")


def check_kl(blocks: Path, floats: Path, what: str) -> None:
    reference = load(floats)
    routes = routing.recorded(reference)
    wanted = whole(reference, PROMPT).log_softmax(-1)
    for exact, isas in DRIVERS.items():
        model = routing.replay(load(blocks, exact_batching=exact), routes)
        for isa in isas:
            native.use_isa(isa)
            got = whole(model, PROMPT).log_softmax(-1)
            kl = (wanted.exp() * (wanted - got)).sum(-1)
            driver = "GEMV" if exact else f"GEMM {isa}"
            print(f"{what} {driver}: mean KL {kl.mean():.2e}, worst row {kl.max():.2e}")
            assert kl.mean() <= KL_BOUND


@pytest.mark.parametrize("format_name", RUNNABLE)
def test_the_random_blocks_have_the_spread_they_promise(format_name: str) -> None:
    """Blocks far from the asked std would make activations grow or vanish, and the KL say nothing."""
    spec = by_name(format_name)
    values = values_of(spec, BLOCKS[format_name](np.random.default_rng(2), 512, 0.05))
    assert np.isfinite(values).all()
    assert 0.03 < values.std() < 0.08
    assert abs(values.mean()) < 0.5 * values.std()
