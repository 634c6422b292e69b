"""The demo model end to end: the same text on every instruction set, and as good as its float products.

Oracles: the dense model it was made from, its blocks read by gguf-py into an F32 file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from isthmus import native
from isthmus.resolve import resolve_model
from isthmus.tokenizer import Tokenizer
from isthmus.weights.demo import carried_file
from isthmus.weights.source import open_weights
from models.steps import Session, load

QUESTION = "Why is the sky blue?"
# Four driver settings, one text; AMX has the vectors of avx512 and differs from it in the GEMM driver only.
PLAIN_ISAS = [name for name in native.isa_names() if name != "amx"]

# English prose that every checkout has, and long enough: 1500 tokens.
TEXT = Path(__file__).parents[2] / "LICENSE"
NUM_TOKENS = 1500


def answer(isa: str) -> str:
    command = ["run", "demo", QUESTION, "--temperature", "0", "--max-tokens", "60", "--exact-batching"]
    return subprocess.run(
        [sys.executable, "-c", "from isthmus.cli.main import main; main()", *command],
        env=os.environ | {"ISTHMUS_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout


def test_same_text_on_every_instruction_set() -> None:
    answers = {isa: answer(isa) for isa in PLAIN_ISAS}
    assert "scattering" in answers["scalar"]
    assert set(answers.values()) == {answers["scalar"]}


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    with contextlib.closing(open_weights(resolve_model("demo"))) as source:
        tokenizer = Tokenizer.from_gguf(source.metadata)
    return tokenizer.encode(TEXT.read_text(), add_special=True, parse_special=False)[:NUM_TOKENS]


def losses(path: Path, tokens: list[int], **options: bool) -> Tensor:
    """Negative log-likelihood of each token after the first, float64 [NUM_TOKENS - 1]."""
    session = Session(load(path, **options), 1, NUM_TOKENS)
    chunks = [session.step([(0, tokens[i : i + 512])])[0] for i in range(0, NUM_TOKENS, 512)]
    logits = torch.cat(chunks)[:-1].double()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")


@pytest.fixture(scope="module")
def float_losses(tokens: list[int], tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Of the dense model in F32."""
    path = tmp_path_factory.mktemp("demo") / "dense-f32.gguf"
    write_f32(carried_file(), path)
    try:
        return losses(path, tokens)
    finally:
        path.unlink()  # 0.5 GB


def write_f32(source_path: Path, path: Path) -> None:
    """The same model with every tensor as gguf-py reads it, in fp32."""
    reader = gguf.GGUFReader(source_path)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            value = field.contents()
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(field.name, value)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.reshape(tuple(reversed(tensor.shape.tolist()))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("exact", [True, False], ids=["gemv", "gemm"])
def test_perplexity_is_that_of_the_float_products(
    exact: bool, tokens: list[int], float_losses: Tensor
) -> None:
    """Half a percent, plus twice what 1500 tokens leave uncertain of the mean of the paired differences."""
    difference = losses(resolve_model("demo"), tokens, exact_batching=exact) - float_losses
    error = float(difference.std()) / len(difference) ** 0.5
    excess = float(difference.mean().exp()) - 1
    print(f"perplexity {float_losses.mean().exp():.3f} in float, {excess:+.2%} +- {error:.2%} here")
    assert 5 < float_losses.mean().exp() < 60  # a model that knows English
    assert error < 0.004  # the answers do not differ so much that the mean would say nothing
    assert abs(excess) <= 0.005 + 2 * error
