"""A model over a packed cache is the same model, bit for bit; a cache that is not its own is never used."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from engine.packed.kit import CACHED, PLAIN, answer, flip, packed_in_memory
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.packed_cache import make_cache, open_cache, verify_cache
from isthmus.errors import ModelFileError
from isthmus.models.base import load_model
from isthmus.weights.packed_path import cache_path
from isthmus.weights.source import open_weights
from models import tiny
from models.steps import Session

FAMILIES = ["llama3-tied", "qwen2moe", "gpt-oss", "deepseek-v2-lite", "deepseek-v3"]


@pytest.mark.parametrize("exact", [False, True], ids=["free", "exact"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_same_bits_and_nothing_is_packed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, exact: bool
) -> None:
    """Experts, their biases, shared experts, an fp32 router, a tied embedding, both layouts of latent
    attention."""
    case = tiny.CASES[name]
    path = tiny.write_case(tmp_path / "model.gguf", case, tiny.build(case))
    options = RunOptions(exact_batching=exact)
    tokens = list(range(3, 40))
    source = open_weights(path)
    plain = Session(load_model(source, options), 1).step([(0, tokens)])[0]
    make_cache(source)
    packed = packed_in_memory(monkeypatch)
    cache = open_cache(source, options)
    cached = Session(load_model(source, options, store=cache), 1).step([(0, tokens)])[0]
    assert torch.equal(cached, plain)
    assert packed == []


def test_it_is_made_once_and_then_used(
    model: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(Engine(model)) == "defg"
    assert not cache_folder.exists()  # nobody asked for one
    assert answer(Engine(model, CACHED)) == "defg"
    packed = packed_in_memory(monkeypatch)
    assert answer(Engine(model)) == answer(Engine(model, CACHED)) == "defg"
    assert packed == []
    assert answer(Engine(model, PLAIN)) == "defg"
    assert packed


def test_it_is_as_large_as_the_weights(model: Path) -> None:
    """The alphabet model has 11 matrices, whose ends are filled up to a page."""
    with closing(open_weights(model)) as source:
        matrices = sum(t.nbytes for t in source.tensors.values() if len(t.shape) > 1)
        size = make_cache(source).stat().st_size
    rows_filled_up = 2 * 12 * 320 * 4  # embedding and head: 260 rows, stored as 272
    assert matrices <= size <= matrices + rows_filled_up + 12 * 4096 + 4096


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a byte of the tiles": flip(4096 + 1000),
    "a byte of the header": flip(9),
    "a byte of the index": flip(-5),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "another file": lambda path: path.write_bytes(b"GGUF" + bytes(10000)),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_cache_is_told_and_made_again(
    model: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    Engine(model, CACHED).close()
    path = cache_path(model)
    good = path.read_bytes()
    DAMAGE[how](path)
    assert answer(Engine(model)) == "defg"
    assert f"{path}: the packed cache" in caplog.text
    assert "it is made again" in caplog.text
    assert path.read_bytes() == good


def test_a_model_that_changed_is_packed_again(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Same size, other weights: the head of the alphabet model now answers every byte with itself."""
    Engine(model, CACHED).close()
    data = bytearray(model.read_bytes())
    with closing(open_weights(model)) as source:
        head = source.tensors["output.weight"].data.tobytes()
        embedding = source.tensors["token_embd.weight"].data.tobytes()
    at = bytes(data).index(head)
    data[at : at + len(head)] = embedding
    model.write_bytes(data)
    assert answer(Engine(model)) == "cccc"
    assert "out of date: model.gguf is not the file it was" in caplog.text


def test_tiles_of_another_version_are_packed_again(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from isthmus.native import ops

    with monkeypatch.context() as older:
        older.setattr(ops, "layout_id", lambda format_id: 1)
        Engine(model, CACHED).close()
    assert answer(Engine(model)) == "defg"
    assert "in tiles of another version" in caplog.text


def test_verification_is_remembered_until_the_file_is_touched(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus.native import ops

    Engine(model, CACHED).close()
    plain, sums = ops.checksum, []
    monkeypatch.setattr(ops, "checksum", lambda *a: (sums.append(a), plain(*a))[1])
    Engine(model).close()
    assert not sums
    os.utime(cache_path(model))
    Engine(model).close()
    assert sums
    sums.clear()
    Engine(model).close()
    assert not sums
    stamp = cache_path(model).with_name(cache_path(model).name + ".verified")
    stamp.write_bytes(stamp.read_bytes()[:-3])
    Engine(model).close()
    assert sums


def test_verify_reads_every_byte_whatever_the_stamp_says(model: Path) -> None:
    with closing(open_weights(model)) as source:
        path = make_cache(source)
        verify_cache(source)
        times = path.stat()
        flip(4096 + 5000)(path)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(ModelFileError, match="damaged in tensor"):
            verify_cache(source)
