"""Downloads: into huggingface-hub's cache, going on where they ended, held against the hub's checksums."""

from __future__ import annotations

import errno
import hashlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

from hub_server import Recorded, hub_server
from isthmus.errors import HubError, UsageError
from isthmus.weights.downloads import PARTIAL, PIECE_BYTES, Downloads, LocalModel
from isthmus.weights.hub import Hub, RepoFile, RepoName, choose_model

REPO = "owner/Model-GGUF"
SHARDS = {f"Q4_K_M/m-Q4_K_M-0000{i}-of-00002.gguf": bytes([i]) * (100_000 * i) for i in (1, 2)}
FILES = {"m-Q8_0.gguf": bytes(range(256)) * 1000, "README.md": b"text"} | SHARDS


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)  # before it tries again
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # less is thrown away
    with hub_server(Recorded({REPO: dict(FILES)})) as server:
        yield server


@pytest.fixture
def downloads(tmp_path: Path) -> Downloads:
    return Downloads(tmp_path / "hub")


def pull(downloads: Downloads, server: Recorded, quant: str) -> tuple[LocalModel, int]:
    """The model, and how many bytes the progress was told."""
    hub, told = Hub(server.url), [0]
    model = choose_model(hub.models(REPO), RepoName(REPO, quant))

    def progress(nbytes: int) -> None:
        told[0] += nbytes

    return downloads.pull(hub, REPO, model, progress), told[0]


def test_all_shards_come_into_the_cache_that_other_tools_read(
    downloads: Downloads, recorded: Recorded
) -> None:
    local, told = pull(downloads, recorded, "Q4_K_M")
    assert told == local.model.nbytes == recorded.sent_bytes == 300_000
    assert [(local.folder / name).read_bytes() for name in SHARDS] == list(SHARDS.values())
    assert local.path == local.folder / next(iter(SHARDS))
    for name in SHARDS:
        theirs = hf_hub_download(REPO, name, cache_dir=downloads.root, local_files_only=True)
        assert Path(theirs) == local.folder / name
    again, told = pull(downloads, recorded, "Q4_K_M")
    assert again == local
    assert told == 300_000
    assert recorded.sent_bytes == 300_000  # nothing came twice


def test_an_ended_download_goes_on_where_it_ended(downloads: Downloads, recorded: Recorded) -> None:
    recorded.breaks_at = 50_000
    with pytest.raises(HubError, match="cannot be reached"):
        pull(downloads, recorded, "Q8_0")
    have = downloads.partial_bytes(REPO)
    assert have == 50_000
    assert downloads.find(RepoName(REPO, "Q8_0")) is None
    models = Hub(recorded.url).models(REPO)
    assert downloads.need_bytes(REPO, choose_model(models, RepoName(REPO, "Q8_0"))) == 206_000
    # What has come of one file spares nothing of another.
    assert downloads.need_bytes(REPO, choose_model(models, RepoName(REPO, "Q4_K_M"))) == 300_000
    recorded.breaks_at, recorded.sent_bytes = None, 0
    local, told = pull(downloads, recorded, "Q8_0")
    assert local.path.read_bytes() == FILES["m-Q8_0.gguf"]
    assert recorded.sent_bytes == 256_000 - have
    assert told == 256_000
    assert downloads.partial_bytes(REPO) == 0


def test_a_file_comes_in_pieces_and_goes_on_within_one(
    downloads: Downloads, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.weights.downloads.PIECE_BYTES", 100_000)
    recorded.breaks_at = 150_000
    with pytest.raises(HubError, match="cannot be reached"):
        pull(downloads, recorded, "Q8_0")
    assert downloads.partial_bytes(REPO) == 150_000
    recorded.breaks_at = None
    recorded.ranges.clear()
    local, told = pull(downloads, recorded, "Q8_0")
    assert recorded.ranges == ["bytes=150000-249999", "bytes=250000-"]
    assert local.path.read_bytes() == FILES["m-Q8_0.gguf"]
    assert told == 256_000


def test_a_server_that_knows_no_ranges_sends_all_of_it(
    downloads: Downloads, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.weights.downloads.PIECE_BYTES", 100_000)
    recorded.knows_ranges = False
    local, told = pull(downloads, recorded, "Q8_0")
    assert local.path.read_bytes() == FILES["m-Q8_0.gguf"]
    assert recorded.sent_bytes == told == 256_000


def test_a_file_that_is_replaced_meanwhile_is_not_mixed(
    downloads: Downloads, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.weights.downloads.PIECE_BYTES", 100_000)
    piece = Hub.download

    def then_replaced(self: Hub, *arguments: object, **keywords: object) -> None:
        piece(self, *arguments, **keywords)  # type: ignore[arg-type]
        recorded.says["m-Q8_0.gguf"] = "0" * 64

    monkeypatch.setattr(Hub, "download", then_replaced)
    with pytest.raises(HubError, match=r"m-Q8_0.gguf was replaced while it came; pull it again"):
        pull(downloads, recorded, "Q8_0")


LARGE = 60 * 10**9  # more than huggingface-hub asks for in one request, and than 32 bits count


def test_a_file_of_60_gb_begins_and_goes_on(downloads: Downloads, recorded: Recorded) -> None:
    """The server says so and sends no more than its beginning."""
    recorded.sizes["m-Q8_0.gguf"] = LARGE
    for ends in (50_000, 90_000):
        recorded.breaks_at = ends
        with pytest.raises(HubError, match="cannot be reached"):
            pull(downloads, recorded, "Q8_0")
        assert downloads.partial_bytes(REPO) == ends
    asked = list(dict.fromkeys(recorded.ranges))
    assert asked[0] == f"bytes=0-{PIECE_BYTES - 1}"
    assert f"bytes=50000-{50_000 + PIECE_BYTES - 1}" in asked
    model = choose_model(Hub(recorded.url).models(REPO), RepoName(REPO, "Q8_0"))
    assert downloads.need_bytes(REPO, model) == LARGE - 90_000


def test_the_end_of_a_file_of_60_gb_is_asked_for_by_its_place(recorded: Recorded) -> None:
    recorded.sizes["m-Q8_0.gguf"] = LARGE
    hub, out = Hub(recorded.url), io.BytesIO()
    found = hub.metadata(REPO, RepoFile("m-Q8_0.gguf", LARGE))
    assert found.size == LARGE
    hub.download(found, out, have=LARGE - 20_000, end=LARGE - 5_000)
    hub.download(found, out, have=LARGE - 5_000, end=LARGE)
    assert recorded.ranges == ["bytes=59999980000-59999994999", "bytes=59999995000-"]
    assert out.getvalue() == bytes(20_000)


def test_a_file_system_of_small_files_is_named(
    downloads: Downloads, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(self: Hub, metadata: object, out: object, *, have: int, end: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(Hub, "download", too_large)
    with pytest.raises(HubError, match="takes no files of this size; set HF_HUB_CACHE"):
        pull(downloads, recorded, "Q8_0")


def test_bytes_that_are_not_what_the_hub_says_are_thrown_away(
    downloads: Downloads, recorded: Recorded
) -> None:
    recorded.says["m-Q8_0.gguf"] = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(HubError, match=r"has the SHA-256 .* it was thrown away: pull it again"):
        pull(downloads, recorded, "Q8_0")
    assert downloads.partial_bytes(REPO) == 0
    del recorded.says["m-Q8_0.gguf"]
    assert pull(downloads, recorded, "Q8_0")[0].path.read_bytes() == FILES["m-Q8_0.gguf"]


def test_a_damaged_beginning_is_found_out_at_the_end(downloads: Downloads, recorded: Recorded) -> None:
    recorded.breaks_at = 50_000
    with pytest.raises(HubError):
        pull(downloads, recorded, "Q8_0")
    recorded.breaks_at = None
    (partial,) = downloads.root.rglob("*" + PARTIAL)
    partial.write_bytes(b"x" + partial.read_bytes()[1:])
    with pytest.raises(HubError, match="SHA-256"):
        pull(downloads, recorded, "Q8_0")


@pytest.mark.parametrize("etag", ["../../evil", "", "a/b"])
def test_an_etag_never_leads_out_of_the_cache(downloads: Downloads, recorded: Recorded, etag: str) -> None:
    recorded.says["m-Q8_0.gguf"] = etag or " "
    with pytest.raises(HubError, match="no usable ETag"):
        pull(downloads, recorded, "Q8_0")


def test_a_full_disk_is_said_before_the_first_byte(
    downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    downloads.check_room(5 * 10**8)
    with pytest.raises(HubError, match=r"404.0 GB are to be downloaded .* 1.0 GB free; make room"):
        downloads.check_room(404 * 10**9)


def test_a_disk_that_fills_up_leaves_what_came(
    downloads: Downloads, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Hub, metadata: object, out: object, *, have: int, end: int) -> None:
        out.write(b"begin")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Hub, "download", full)
    with pytest.raises(HubError, match="is full; make room"):
        pull(downloads, recorded, "Q8_0")
    assert downloads.partial_bytes(REPO) == 5


def test_removing_one_model_leaves_the_others(downloads: Downloads, recorded: Recorded) -> None:
    first, _ = pull(downloads, recorded, "Q4_K_M")
    second, _ = pull(downloads, recorded, "Q8_0")
    assert [str(local) for local in downloads.models(REPO)] == [f"{REPO}:Q8_0", f"{REPO}:Q4_K_M"]
    assert downloads.remove(first) == 300_000
    assert downloads.models(REPO) == [second]
    assert second.path.read_bytes() == FILES["m-Q8_0.gguf"]
    assert downloads.remove(second) == 256_000
    assert downloads.repos() == []


def test_a_name_without_a_quantisation_is_the_only_one_here(downloads: Downloads, recorded: Recorded) -> None:
    assert downloads.find(RepoName(REPO)) is None
    eight, _ = pull(downloads, recorded, "Q8_0")
    assert downloads.find(RepoName(REPO)) == eight
    four, _ = pull(downloads, recorded, "Q4_K_M")
    assert downloads.find(RepoName(REPO)) == four  # the usual one
    downloads.remove(four)
    (four.folder / "other-Q2_K.gguf").parent.mkdir(exist_ok=True)
    (four.folder / "other-Q2_K.gguf").write_bytes(b"x")
    with pytest.raises(UsageError, match="holds 2 models; say which"):
        downloads.find(RepoName(REPO))


def test_half_a_set_of_shards_is_no_model(downloads: Downloads, recorded: Recorded) -> None:
    local, _ = pull(downloads, recorded, "Q4_K_M")
    (local.folder / next(iter(SHARDS))).unlink()
    assert downloads.models(REPO) == []
    assert downloads.find(RepoName(REPO, "Q4_K_M")) is None
