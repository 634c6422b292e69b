"""An open GGUF file: what it says agrees with gguf-py, and what it does to memory, descriptors and page
cache."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_builder import F32, Q8_0, build, header, small_model, tensor

from isthmus.errors import MalformedFileError, ModelFileError
from isthmus.formats.reference import dequantize
from isthmus.weights import cursor
from isthmus.weights.gguf import GgufSource
from isthmus.weights.source import open_weights

T = gguf.GGMLQuantizationType


def write_with_gguf_py(path: Path, **options: object) -> None:
    """A file by gguf-py with every kind of metadata and a tensor of each of several formats."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(3)
    writer.add_rope_freq_base(1e6)
    writer.add_causal_attention(True)
    writer.add_uint64("big", 1 << 40)
    writer.add_int16("small", -3)
    writer.add_float64("fine", 0.1)
    writer.add_token_list(["<s>", "", "Grüße", "日本", "🙂"])
    writer.add_token_types([3, 1, 1, 1, 1])
    writer.add_token_scores([0.0, -1.5, -2.0, -2.5, -3.0])
    writer.add_array("no.elements", [])
    for kind, shape in [
        (T.F32, (7,)),
        (T.F16, (3, 5)),
        (T.Q8_0, (2, 64)),
        (T.Q4_K, (4, 3, 256)),
        (T.BF16, (2, 2, 2, 6)),
        (T.IQ1_S, (2, 256)),
    ]:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)
        if kind in (T.F32, T.F16):
            writer.add_tensor(f"{kind.name}.weight", raw.view(np.float32 if kind is T.F32 else np.float16))
        else:
            writer.add_tensor(f"{kind.name}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_metadata_and_tensors_agree_with_gguf_py(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_with_gguf_py(path)
    theirs = gguf.GGUFReader(path)
    ours = open_weights(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for theirs_tensor in theirs.tensors:
        tensor = ours.tensors[theirs_tensor.name]
        assert tensor.format.ggml_id == theirs_tensor.tensor_type
        assert tensor.shape == tuple(reversed(theirs_tensor.shape.tolist()))
        assert bytes(tensor.data) == theirs_tensor.data.tobytes()
        assert tensor.nbytes == theirs_tensor.n_bytes


def test_version_2_is_the_same_format(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build(None, [tensor("w", [4, 2], F32, 0)], struct.pack("<8f", *range(8)), version=2))
    raw = open_weights(path).tensors["w"]
    np.testing.assert_array_equal(dequantize(raw.format, raw.data), np.arange(8))


def test_offsets_count_from_the_alignment_the_file_asks_for(tmp_path: Path) -> None:
    from gguf_builder import u32

    path = tmp_path / "model.gguf"
    pairs = [u32("general.alignment", 4096)]
    path.write_bytes(build(pairs, [tensor("w", [4], F32, 4096)], bytes(4096) + b"abcd" * 4, alignment=4096))
    raw = open_weights(path).tensors["w"]
    assert bytes(raw.data) == b"abcd" * 4


def test_data_is_read_only_and_outlives_the_source(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_model())
    source = open_weights(path)
    data = source.tensors["token_embd.weight"].data
    assert data.readonly
    assert (data.format, data.ndim, data.nbytes) == ("B", 1, 68)
    source.close()
    source.close()  # closing twice is nothing special
    assert bytes(data) == bytes(range(68))
    assert not source.tensors


def test_closing_gives_back_every_descriptor_and_the_mapping(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_model())
    before = os.listdir("/proc/self/fd")
    source = open_weights(path)
    source.close()
    assert os.listdir("/proc/self/fd") == before
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_refused_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_model()[:-1])
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MalformedFileError):
        open_weights(path)
    assert os.listdir("/proc/self/fd") == before


def resident_kib(path: Path) -> int:
    """KiB of the mapping of `path` that are in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return next(int(row.split()[1]) for row in lines if row.startswith("Rss:"))
    raise AssertionError(f"{path} is not mapped")


def sparse_model(path: Path, rows: int) -> None:
    """A tensor of `rows` x 4 KiB of which only one byte, in the middle, was ever written."""
    with path.open("wb") as file:
        head = build(None, [tensor("w", [1024, rows], F32, 0)])
        file.write(head)
        file.seek(len(head) + rows * 2048)
        file.write(b"\x3f")
        file.truncate(len(head) + rows * 4096)


def test_opening_reads_the_header_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB of tensor: no read goes past the header, and not one page of the mapping is touched."""
    path = tmp_path / "model.gguf"
    sparse_model(path, rows=1 << 21)
    reads: list[int] = []
    pread = os.pread

    def watched(fd: int, count: int, offset: int) -> bytes:
        reads.append(offset + count)
        return pread(fd, count, offset)

    monkeypatch.setattr(cursor, "CHUNK_BYTES", 16)
    monkeypatch.setattr(os, "pread", watched)
    source = open_weights(path)
    head_bytes = len(header(None, [tensor("w", [1024, 1 << 21], F32, 0)]))
    assert max(reads) < max(512, head_bytes) + 16  # 512: the prefix by which other files are recognised
    assert resident_kib(path) == 0
    assert source.tensors["w"].nbytes == 8 << 30
    assert resident_kib(path) == 0


def test_released_pages_leave_the_process_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build(None, [tensor("w", [1024, 256], F32, 0)], b"\x01" * (1 << 20)))
    source = open_weights(path)
    data = source.tensors["w"].data
    assert sum(data[::4096]) == 256
    assert resident_kib(path) >= 1024
    source.release("w")
    assert resident_kib(path) == 0
    assert sum(data[::4096]) == 256


def test_of_a_model_too_large_for_memory_the_page_cache_is_given_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, start, length, how: advised.append((start, length, how))
    )
    path = tmp_path / "model.gguf"
    path.write_bytes(build(None, [tensor("w", [1024, 4], F32, 0)], bytes(1 << 14)))
    open_weights(path).release("w")
    assert not advised  # a model of 16 KiB stays cached for the next start
    monkeypatch.setattr(os, "sysconf", lambda name: 64)  # a machine with 64 pages of 64 bytes
    open_weights(path).release("w")
    assert [how for _, _, how in advised] == [os.POSIX_FADV_DONTNEED]
    start, length, _ = advised[0]
    assert start % 4096 == 0
    assert start + length == path.stat().st_size


def test_a_file_cut_while_open_is_an_error_at_the_next_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    content = small_model()
    path.write_bytes(content)
    source = open_weights(path)
    os.truncate(path, len(content) - 20)
    with pytest.raises(
        MalformedFileError, match=f"changed while it was in use.*{len(content)} bytes"
    ) as caught:
        source.tensors["norm.weight"]
    assert str(path) in str(caught.value)
    with pytest.raises(MalformedFileError, match="changed while it was in use"):
        source.check("token_embd.weight")


def test_a_file_written_over_while_open_is_an_error_at_the_next_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    content = small_model()
    path.write_bytes(content)
    source = open_weights(path)
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))  # the clock of a file system may be too coarse to tell two writes apart
    with pytest.raises(MalformedFileError, match="changed while it was in use"):
        source.tensors["norm.weight"]


def test_a_file_replaced_by_another_stays_the_one_that_was_opened(tmp_path: Path) -> None:
    """A finished download moved into place is a new file; the open one is still whole."""
    path = tmp_path / "model.gguf"
    path.write_bytes(small_model())
    source = open_weights(path)
    (tmp_path / "new").write_bytes(b"something else")
    (tmp_path / "new").rename(path)
    assert bytes(source.tensors["token_embd.weight"].data) == bytes(range(68))


def test_a_tensor_that_was_never_written_is_named(tmp_path: Path) -> None:
    """A download that reserved its space and stopped: the header is whole, a tensor is one hole."""
    path = tmp_path / "model.gguf"
    head = build(None, [tensor("a", [1024, 512], F32, 0), tensor("b", [1024, 512], F32, 2 << 20)])
    with path.open("wb") as file:
        file.write(head + b"\x01" * (2 << 20))
        file.truncate(len(head) + (4 << 20))
    with pytest.raises(
        MalformedFileError, match="tensor 'b' was never written: its 2097152 bytes are a hole"
    ):
        open_weights(path)


def test_zeros_that_were_written_are_weights_like_others(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build(None, [tensor("a", [1024, 512], F32, 0)], bytes(2 << 20)))
    assert not any(open_weights(path).tensors["a"].data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be opened: No such file or directory"),
        (lambda path: path.mkdir(), "is a directory; give the path of a .gguf file"),
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.symlink_to(path.name), "cannot be opened: Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_said(make: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(path)  # type: ignore[operator]
    with pytest.raises(ModelFileError, match=message) as caught:
        open_weights(path)
    assert str(caught.value).startswith(str(path))


def test_value_types_are_kept_for_writers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_model())
    types = {key: kind.name for key, kind in GgufSource(path).value_types.items()}
    assert types["a.u16"] == "UINT16"
    assert types["a.tokens"] == "STRING"
    assert types["a.nested"] == "ARRAY"


def test_a_tensor_is_known_by_its_row_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build(None, [tensor("w", [64, 3, 2], Q8_0, 0)], bytes(range(204)) * 2))
    raw = open_weights(path).tensors["w"]
    assert raw.shape == (2, 3, 64)
    assert raw.nbytes == 2 * 3 * raw.format.row_bytes(64) == 408
