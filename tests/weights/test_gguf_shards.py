"""Split models: found from any file, and every way in which a set can be incomplete or mixed."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_builder import ARCHITECTURE, F32, build, i32, tensor, text, u16, u32

from isthmus.errors import MalformedFileError
from isthmus.weights.source import open_weights


def shard(number: int, count: int, names: list[str], total: int, extra: list[bytes] | None = None) -> bytes:
    """One file of a set; `number` counts from 0. Each tensor is 8 floats with its shard's number."""
    pairs = [u16("split.no", number), u16("split.count", count), i32("split.tensors.count", total)]
    if number == 0:
        pairs = [text(ARCHITECTURE, "llama"), u32("general.file_type", 15), *pairs]
    tensors = [tensor(name, [8], F32, 32 * i) for i, name in enumerate(names)]
    return build(pairs + (extra or []), tensors, struct.pack("<8f", *[number] * 8) * len(names))


def name(number: int, count: int = 3) -> str:
    return f"m-{number:05}-of-{count:05}.gguf"


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A folder with a sound set of three: tensors a, b | c | d."""
    for number, names in enumerate([["a", "b"], ["c"], ["d"]]):
        (tmp_path / name(number + 1)).write_bytes(shard(number, 3, names, 4))
    return tmp_path


def refused(path: Path, message: str) -> None:
    with pytest.raises(MalformedFileError, match=re.escape(message)):
        open_weights(path)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_shard_opens_the_whole_model(split: Path, number: int) -> None:
    source = open_weights(split / name(number))
    assert source.path == split / name(1)
    assert source.metadata["general.file_type"] == 15  # which stands in the first shard alone
    assert list(source.tensors) == ["a", "b", "c", "d"]
    values = [np.frombuffer(t.data, np.float32)[0] for t in source.tensors.values()]
    assert values == [0, 0, 1, 2]
    assert source.tensors["c"].file == split / name(2)


def test_the_first_shard_may_hold_metadata_alone(tmp_path: Path) -> None:
    (tmp_path / name(1, 2)).write_bytes(shard(0, 2, [], 1))
    (tmp_path / name(2, 2)).write_bytes(shard(1, 2, ["a"], 1))
    assert list(open_weights(tmp_path / name(2, 2)).tensors) == ["a"]


def test_a_set_written_by_gguf_py_agrees_with_its_reader(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    arrays = {f"t{i}": np.full((3, i + 1), i, np.float32) for i in range(5)}
    for key, value in arrays.items():
        writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_weights(tmp_path / name(2))
    assert {key: raw.shape for key, raw in source.tensors.items()} == {k: v.shape for k, v in arrays.items()}
    for key, value in arrays.items():
        assert bytes(source.tensors[key].data) == value.tobytes()


def test_shards_are_looked_for_beside_the_link_not_behind_it(split: Path, tmp_path: Path) -> None:
    """A download cache keeps blobs named by hash and a folder of links that have the real names."""
    links = tmp_path / "snapshot"
    links.mkdir()
    for number in (1, 2, 3):
        blob = (split / name(number)).rename(split / f"blob{number}")
        (links / name(number)).symlink_to(blob)
    assert len(open_weights(links / name(2)).tensors) == 4


def test_one_file_may_be_named_as_a_set_of_one(tmp_path: Path) -> None:
    path = tmp_path / name(1, 1)
    path.write_bytes(build(None, [tensor("a", [8], F32, 0)], bytes(32)))
    assert list(open_weights(path).tensors) == ["a"]


def test_missing_shards_are_listed(split: Path) -> None:
    (split / name(1)).unlink()
    (split / name(3)).unlink()
    refused(split / name(2), f"2 of the model's 3 files are missing in {split}: {name(1)}, {name(3)}")


def test_a_shard_cut_short_is_named_though_another_was_given(split: Path) -> None:
    content = (split / name(3)).read_bytes()
    (split / name(3)).write_bytes(content[:-1])
    refused(split / name(1), f"{split / name(3)}: tensor 'd' (f32, [8]) ends at byte")


def test_a_shard_that_is_a_pointer_is_named_though_another_was_given(split: Path) -> None:
    (split / name(2)).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    refused(split / name(1), f"{split / name(2)}: not a GGUF file but the pointer that Git LFS leaves")


def test_shards_that_changed_places(split: Path) -> None:
    (split / name(2)).rename(split / "x")
    (split / name(3)).rename(split / name(2))
    (split / "x").rename(split / name(3))
    refused(
        split / name(1),
        f"{split / name(2)}: key 'split.no' is 2, but as file 2 beside {name(1)} it must be 1",
    )
    refused(split / name(2), "is named as file 2 of 3, but its header says 3 of 3 (split.no 2)")


def test_a_shard_of_a_set_of_another_length(split: Path) -> None:
    (split / name(2)).write_bytes(shard(1, 4, ["c"], 4))
    refused(split / name(1), f"{split / name(2)}: key 'split.count' is 4, but as file 2")


def test_a_name_with_the_wrong_count(split: Path) -> None:
    path = (split / name(1)).rename(split / name(1, 2))
    refused(path, "is named as file 1 of 2, but its header says 1 of 3")


def test_a_shard_under_another_name(split: Path) -> None:
    path = (split / name(2)).rename(split / "second.gguf")
    refused(
        path, "is file 2 of a model split into 3; to be found, they must be named NAME-00002-of-00003.gguf"
    )


def test_a_file_cut_by_hand_and_named_as_a_shard(tmp_path: Path) -> None:
    path = tmp_path / name(1, 2)
    path.write_bytes(build(None, [tensor("a", [8], F32, 0)], bytes(32)))
    refused(
        path, "is named as file 1 of 2, but its header has no split.count; cut files must be joined again"
    )


def test_a_shard_of_another_quantisation_brings_a_tensor_twice(split: Path) -> None:
    """Larger tensors move the cuts: the second file of another set begins at a tensor the first already
    has."""
    (split / name(2)).write_bytes(shard(1, 3, ["b"], 4))
    refused(
        split / name(1),
        f"{split / name(2)}: tensor 'b' also stands in {name(1)}; the files come from different",
    )


def test_a_shard_of_another_quantisation_lacks_a_tensor(split: Path) -> None:
    (split / name(2)).write_bytes(shard(1, 3, [], 4))
    refused(
        split / name(1),
        "key 'split.tensors.count' says 4 tensors, but 3 files hold 3; they come from different",
    )


def test_a_shard_of_another_total(split: Path) -> None:
    (split / name(2)).write_bytes(shard(1, 3, ["c"], 5))
    refused(split / name(1), f"{split / name(2)}: key 'split.tensors.count' is 5, but as file 2")


def test_a_shard_whose_metadata_contradicts_the_first(split: Path) -> None:
    (split / name(2)).write_bytes(shard(1, 3, ["c"], 4, [u32("general.file_type", 7)]))
    refused(split / name(1), f"{split / name(2)}: key 'general.file_type' is not as in {name(1)}")


def test_a_shard_that_does_not_say_its_number(split: Path) -> None:
    (split / name(2)).write_bytes(build([u16("split.count", 3)], [tensor("c", [8], F32, 0)], bytes(32)))
    refused(
        split / name(2),
        f"{split / name(2)}: key 'split.no' is missing, but the file belongs to a split model",
    )
    refused(split / name(1), f"{split / name(2)}: key 'split.no' is missing")


def test_split_keys_of_another_type(split: Path) -> None:
    pairs = [text("split.count", "3"), u16("split.no", 0)]
    (split / name(1)).write_bytes(build(pairs))
    refused(split / name(1), "key 'split.count' must be an integer of at least 0, got '3'")
