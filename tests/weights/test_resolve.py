"""From a name to a file: paths, folders, `demo`, and what is said when there is nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.errors import ModelFileError, UsageError
from isthmus.resolve import resolve_model


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"")


def test_a_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "m.gguf", "blob-without-suffix")
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert resolve_model(str(tmp_path / "blob-without-suffix")) == tmp_path / "blob-without-suffix"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf") == tmp_path / "m.gguf"


def test_demo_is_made_by_the_demo_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def demo_model(progress: object) -> Path:
        asked.append(progress)
        return tmp_path / "demo.gguf"

    monkeypatch.setattr("isthmus.weights.demo.demo_model", demo_model)
    assert resolve_model("demo", progress=print) == tmp_path / "demo.gguf"
    assert asked == [print]


def test_a_folder_with_one_model_stands_for_it(tmp_path: Path) -> None:
    make(tmp_path, "m.gguf", "mmproj-m.gguf", "README.md")
    assert resolve_model(str(tmp_path)) == tmp_path / "m.gguf"


def test_a_folder_with_one_split_set_stands_for_its_first_file(tmp_path: Path) -> None:
    make(tmp_path, "m-00002-of-00002.gguf", "m-00001-of-00002.gguf")
    assert resolve_model(str(tmp_path)) == tmp_path / "m-00001-of-00002.gguf"


def test_a_folder_with_several_models_lists_them(tmp_path: Path) -> None:
    make(tmp_path, "b.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf")
    with pytest.raises(ModelFileError, match=r"holds 2 models, .*: a-00001-of-00002.gguf, b.gguf"):
        resolve_model(str(tmp_path))


def test_a_folder_without_a_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds no .gguf file$"):
        resolve_model(str(tmp_path))
    make(tmp_path, "model.safetensors", "config.json")
    with pytest.raises(
        ModelFileError, match=r"holds no .gguf file, only safetensors; take the model in GGUF"
    ):
        resolve_model(str(tmp_path))


def test_a_near_miss_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "qwen3-30b-q4_k_m.gguf")
    with pytest.raises(UsageError, match=re.escape(f"did you mean {tmp_path / 'qwen3-30b-q4_k_m.gguf'}?")):
        resolve_model(str(tmp_path / "qwen3-30b-q4km.gguf"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"did you mean demo\?"):
        resolve_model("dmeo")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "a model cannot be called ''; give the path of a .gguf file, owner/repo:QUANT"),
        ("a\x00b", "cannot be called 'a\\x00b'"),
        ("nothing-like-it", "no model called 'nothing-like-it'; give the path of a .gguf file"),
        ("no/such/folder.gguf", "the folder 'no/such' does not exist"),
        ("https://example.com/m.gguf", "only repositories of the Hugging Face Hub are downloaded"),
        ("x" * 5000, "a model cannot be called 'xxxx"),
        ("llama3:8b", "Ollama's library is not read here; give the path of a .gguf file, owner/repo:QUANT"),
        ("qwen3-30b-a3b", "isthmus plan qwen3-30b-a3b says what it takes, dummy:qwen3-30b-a3b?layers=2 runs"),
        ("hf.co/owner/repo:Q4_K_M", "isthmus pull owner/repo:Q4_K_M does that"),
    ],
)
def test_a_name_that_cannot_be_meant(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)):
        resolve_model(name)


def test_resolving_a_path_needs_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, isthmus.weights.source; from isthmus.resolve import resolve_model; "
        "resolve_model(sys.executable); assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
