"""Models in repositories: which files are meant, headers alone by range requests, and all that goes wrong."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import pytest
from gguf_builder import ARCHITECTURE, F32, build, i32, tensor, text, u16, u32

from hub_server import Recorded, hub_server
from isthmus.errors import HubError, MalformedFileError, UsageError
from isthmus.weights.headers import remote_source
from isthmus.weights.hub import Hub, RepoFile, RepoName, choose_model, group_models

MIB = 1 << 20


def shard(number: int, name: str, data_mib: int) -> bytes:
    """One of two files; each has one tensor of `data_mib`."""
    pairs = [u16("split.no", number), u16("split.count", 2), i32("split.tensors.count", 2)]
    if number == 0:
        pairs = [text(ARCHITECTURE, "llama"), u32("llama.block_count", 1), *pairs]
    return build(pairs, [tensor(name, [MIB // 4 * data_mib], F32, 0)], bytes(data_mib * MIB))


SHARDS = {
    "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf": shard(0, "a", 8),
    "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf": shard(1, "b", 4),
}
LYING = build([text(ARCHITECTURE, "llama")], [tensor("a", [1 << 30], F32, 0)], bytes(32))


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    repositories = {
        "owner/Model-GGUF": {"README.md": b"text", "mmproj-F16.gguf": b"x", "m-UD-Q2_K_XL.gguf": LYING}
        | SHARDS,
        "owner/plain": {"model.safetensors": b"x"},
    }
    closed = {"meta/gated": (403, "GatedRepo"), "owner/secret": (403, "")}
    with hub_server(Recorded(repositories, closed)) as server:
        yield server


def test_shards_of_a_quantisation_are_found_and_only_their_headers_are_read(recorded: Recorded) -> None:
    hub = Hub(recorded.url)
    model = choose_model(hub.models("owner/Model-GGUF"), RepoName("owner/Model-GGUF"))
    assert model.quant == "Q4_K_M"
    assert model.nbytes == sum(len(data) for data in SHARDS.values())
    source = remote_source(hub, "owner/Model-GGUF", model)
    assert {name: raw.nbytes for name, raw in source.tensors.items()} == {"a": 8 * MIB, "b": 4 * MIB}
    assert source.metadata["llama.block_count"] == 1
    # The set has 12 MiB; asked for are a block of each file, and read-ahead of another.
    assert recorded.sent_bytes <= 2 * (2 * MIB + MIB // 4) + MIB
    with pytest.raises(HubError, match="only the header of this model is known; download it"):
        _ = source.tensors["a"].data


def test_layers_for_guesses_are_left_out(recorded: Recorded) -> None:
    """As of a file that is here: `tests/models/test_mtp.py`."""
    pairs = [text(ARCHITECTURE, "glm4moe"), u32("glm4moe.block_count", 2)]
    tensors = [tensor(name, [8], F32, 32 * i) for i, name in enumerate(("blk.0.a", "blk.1.a", "b"))]
    file = build([*pairs, u32("glm4moe.nextn_predict_layers", 1)], tensors, bytes(96))
    recorded.repositories["owner/mtp"] = {"m-Q8_0.gguf": file}
    hub = Hub(recorded.url)
    source = remote_source(hub, "owner/mtp", choose_model(hub.models("owner/mtp"), RepoName("owner/mtp")))
    assert list(source.tensors) == ["blk.0.a", "b"]


@pytest.mark.parametrize(
    ("asked", "quant"),
    [("q4_k_m", "Q4_K_M"), ("UD-Q2_K_XL", "UD-Q2_K_XL"), ("m-UD-Q2_K_XL.gguf", "UD-Q2_K_XL")],
)
def test_a_quantisation_is_asked_for_in_any_case_or_by_its_file(asked: str, quant: str) -> None:
    files = [RepoFile(path, 10) for path in (*SHARDS, "m-UD-Q2_K_XL.gguf")]
    assert choose_model(group_models("o/r", files), RepoName("o/r", asked)).quant == quant


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "Q4_K_M"),
        ("gpt-oss-20b-mxfp4.gguf", "mxfp4"),
        ("BF16/DeepSeek-V3-BF16-00001-of-00001.gguf", "BF16"),
        ("Kimi-K2-UD-IQ1_S.gguf", "UD-IQ1_S"),
        ("UD-Q4_K_XL/GLM-4.5-Air.gguf", "UD-Q4_K_XL"),
        ("Mixtral-8x7B.gguf", "Mixtral-8x7B"),  # tells none
    ],
)
def test_quantisations_are_recognised_in_names(path: str, quant: str) -> None:
    assert [model.quant for model in group_models("o/r", [RepoFile(path, 1)])] == [quant]


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("owner/repo", RepoName("owner/repo")),
        ("owner/repo:Q4_K_M", RepoName("owner/repo", "Q4_K_M")),
        ("owner/repo:sub/file.gguf", RepoName("owner/repo", "sub/file.gguf")),
        ("folder/file.gguf", None),
        ("a/b/c", None),
        ("/owner/repo", None),
        ("./owner/repo", None),
        ("dummy:deepseek-v3", None),
        ("owner/repo:", None),
        ("hf.co/owner/repo:Q4_K_M", RepoName("owner/repo", "Q4_K_M")),
        ("huggingface.co/owner/repo", RepoName("owner/repo")),
        ("https://huggingface.co/owner/repo/tree/main", RepoName("owner/repo")),
        ("https://huggingface.co/owner/repo/", RepoName("owner/repo")),
        (
            "https://huggingface.co/owner/repo/resolve/main/Q4/m-00001-of-00002.gguf?download=true",
            RepoName("owner/repo", "Q4/m-00001-of-00002.gguf"),
        ),
        ("https://huggingface.co/owner/repo/blob/main/m.gguf", RepoName("owner/repo", "m.gguf")),
        ("https://huggingface.co/owner", None),
        ("hf.co/owner", None),
        ("hf.co/datasets/name", None),
        ("https://example.com/owner/repo", None),
    ],
)
def test_what_looks_like_a_repository(name: str, parsed: RepoName | None) -> None:
    assert RepoName.parse(name) == parsed


def test_a_typo_lists_the_quantisations_there_are(recorded: Recorded) -> None:
    models = Hub(recorded.url).models("owner/Model-GGUF")
    with pytest.raises(UsageError, match=re.escape("has no 'Q4_K_S' (did you mean Q4_K_M")):
        choose_model(models, RepoName("owner/Model-GGUF", "Q4_K_S"))
    with pytest.raises(UsageError, match=r"there are UD-Q2_K_XL \(0.0 GB\), Q4_K_M"):
        choose_model(models, RepoName("owner/Model-GGUF", "zzz"))


def test_a_set_with_missing_shards_is_refused() -> None:
    with pytest.raises(HubError, match="only 1 of 2 files are there"):
        group_models("o/r", [RepoFile("m-Q4_K_M-00001-of-00002.gguf", 1)])


@pytest.mark.parametrize(
    ("repo", "said"),
    [
        ("owner/Modle-GGUF", "there is no owner/Modle-GGUF at .*did you mean owner/Model-GGUF"),
        ("meta/gated", "is gated: accept its terms on its page, then log in"),
        ("owner/secret", "may not be read: 403; log in with a token that may"),
        ("owner/plain", "holds no .gguf file, only safetensors"),
    ],
)
def test_a_repository_that_cannot_be_had_is_one_line_that_says_why(
    recorded: Recorded, repo: str, said: str
) -> None:
    with pytest.raises(HubError, match=said) as caught:
        Hub(recorded.url).models(repo)
    assert "\n" not in str(caught.value)


def test_a_header_that_lies_is_refused_as_in_a_file(recorded: Recorded) -> None:
    hub = Hub(recorded.url)
    model = choose_model(hub.models("owner/Model-GGUF"), RepoName("owner/Model-GGUF", "UD-Q2_K_XL"))
    with pytest.raises(MalformedFileError, match=r"tensor 'a' .*but the file has"):
        remote_source(hub, "owner/Model-GGUF", model)


def test_without_a_network_the_error_names_what_to_check() -> None:
    with pytest.raises(HubError, match=r"cannot be reached .*check the network, HF_ENDPOINT"):
        Hub("http://127.0.0.1:9").models("owner/repo")


def test_the_recording_answers_ranges_as_asked(recorded: Recorded) -> None:
    """Of the tests' own server: a range beyond the header is what the file holds there."""
    file = RepoFile("Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", len(next(iter(SHARDS.values()))))
    with Hub(recorded.url).open("owner/Model-GGUF", file, block_bytes=1 << 16) as read_at:
        assert read_at(4, 0) == b"GGUF"
        assert struct.unpack("<I", read_at(4, 4)) == (3,)
        assert read_at(100, file.nbytes - 4) == bytes(4)
