"""Files that are not GGUF but bear its name: the error says what they are and what to do."""

from __future__ import annotations

import gzip
import json
import re
import struct
import zipfile
from pathlib import Path

import pytest
from gguf_builder import ARCHITECTURE, F32, build, tensor, text

from isthmus.errors import MalformedFileError, UnsupportedError
from isthmus.weights.inspection import inspect_file
from isthmus.weights.source import open_weights

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 18632000000\n"
)


def safetensors() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file; the download did not start or failed"),
        (POINTER, "the pointer that Git LFS leaves in a clone, the model has 18.63 GB; .*: git lfs pull"),
        (
            b"<!DOCTYPE html>\n<html><head><title>404</title>",
            "a web page; the server sent an error or login page",
        ),
        (b"\xef\xbb\xbf\n  <HTML>", "a web page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", "a web page"),
        (b'{"error":"Invalid username or password."}', 'JSON text, .*"Invalid username or password."'),
        (b"Entry not found", "text, 'Entry not found'"),
        (b"# A page\nwith lines\n", r"text, '# A page\\nwith lines\\n'"),
        (safetensors(), "a safetensors file; take the model in GGUF format"),
        (gzip.compress(b"GGUF"), "gzip data; decompress it first"),
        (b"\x80\x02}q\x00.", "a Python pickle .*, which is never opened"),
        (
            bytes(4096),
            "a file that begins with zeros; the space was reserved but the download never finished",
        ),
        (b"tjgg\x03\x00\x00\x00", "a GGML file from before GGUF"),
        (b"FUGG\x03\x00\x00\x00", "a GGUF file in reversed byte order"),
        (
            b"\x7fELF\x02\x01\x01\x00",
            "something else: it starts with the bytes 7f 45 4c 46 02 01 01 00, a GGUF file with 'GGUF'",
        ),
    ],
)
def test_is_recognised(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(MalformedFileError, match="not a GGUF file but " + message) as caught:
        open_weights(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_checkpoint_in_a_zip_archive_is_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(MalformedFileError, match=re.escape("a zip archive, perhaps a PyTorch checkpoint")):
        open_weights(path)


@pytest.mark.parametrize(
    ("kind", "architecture", "name", "said"),
    [
        ("adapter", "llama", "blk.0.attn_q.weight.lora_a", "a LoRA adapter"),
        ("mmproj", "clip", "v.blk.0.ln1.weight", "the image or sound encoder"),
        ("model", "clip", "v.blk.0.ln1.weight", "the image or sound encoder"),
        ("imatrix", "", "output.weight.in_sum2", "an importance matrix"),
        ("", "controlvector", "direction.1", "a control vector"),
    ],
)
def test_what_lies_beside_models_is_told_by_name(
    tmp_path: Path, kind: str, architecture: str, name: str, said: str
) -> None:
    path = tmp_path / "m.gguf"
    pairs = [text(k, v) for k, v in (("general.type", kind), (ARCHITECTURE, architecture)) if v]
    path.write_bytes(build(pairs, [tensor(name, [4], F32, 0)], bytes(range(16))))
    with pytest.raises(UnsupportedError, match=f"m.gguf: is {said}"):
        open_weights(path)
    assert f"this is {said}" in " ".join(inspect_file(path).problems)
