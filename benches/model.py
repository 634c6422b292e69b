"""A whole model to time: the file named on the command line, or one of real shapes in a temporary folder."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isthmus import native
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.resolve import resolve_model
from isthmus.weights.source import RawTensor, open_weights
from make_gguf import make_gguf

DEFAULT = ("qwen3-30b-a3b", 12, "q4_k_m")  # name, layers, quantisation: 5 GB


def arguments(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    name, layers, quant = DEFAULT
    help_model = f"a GGUF file; without it {name}, {layers} layers, {quant}, made and deleted again"
    parser.add_argument("model", nargs="?", help=help_model)
    parser.add_argument("--isa", nargs="+", default=[native.current_isa()], choices=native.isa_names())
    parser.add_argument("-p", "--prompt-tokens", type=int, default=512)
    return parser.parse_args()


@contextmanager
def model_file(given: str | None) -> Iterator[Path]:
    """The file given, or the default model, which is deleted when the context ends."""
    if given is not None:
        yield resolve_model(given)
        return
    name, layers, quant = DEFAULT
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        path = Path(folder) / f"{name}-{layers}-{quant}.gguf"
        make_gguf(path, name, layers, quant)
        yield path


@contextmanager
def loaded(given: str | None) -> Iterator[tuple[Engine, Path]]:
    """Tiles are the same for every instruction set: load once, then `native.use_isa`."""
    with model_file(given) as path:
        engine = Engine(path, RunOptions())
        yield engine, path
        engine.close()


def flop_per_prompt(path: Path, tokens: int) -> float:
    """Operations of a prompt's products with weights: its rows through the layers, one through the head."""
    source = open_weights(path)
    arch = source.metadata.str("general.architecture")
    experts = source.metadata.get(f"{arch}.expert_count") or 1
    share = (source.metadata.get(f"{arch}.expert_used_count") or 1) / experts

    def weights(raw: RawTensor) -> float:
        count = 1.0
        for size in raw.shape:
            count *= size
        return count * share if "_exps." in raw.name else count

    matrices = {raw.name: weights(raw) for raw in source.tensors.values() if len(raw.shape) > 1}
    source.close()
    embedding = matrices.pop("token_embd.weight")
    head = matrices.pop("output.weight", embedding)
    return 2 * (tokens * sum(matrices.values()) + head)
