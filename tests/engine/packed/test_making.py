"""A packed cache that cannot be made, or not in peace: the model runs, and nothing half done is left."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.packed.kit import CACHED, answer, flip, packed_in_memory
from isthmus.engine import packed_cache
from isthmus.engine.engine import Engine
from isthmus.engine.packed_cache import make_cache, verify_cache
from isthmus.errors import ModelFileError, UsageError
from isthmus.weights.packed_path import cache_path
from isthmus.weights.source import open_weights


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match=r"cannot write the packed cache .*set ISTHMUS_CACHE"):
        Engine(model, CACHED)
    assert answer(Engine(model)) == "defg"


def test_a_folder_in_its_place_is_said_before_anything_is_packed(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache_path(model)
    path.mkdir(parents=True)
    packed = packed_in_memory(monkeypatch)
    with (
        closing(open_weights(model)) as source,
        pytest.raises(ModelFileError, match=rf"{path.name} is a folder, .*; remove it, or set ISTHMUS_CACHE"),
    ):
        make_cache(source)
    assert not packed
    assert answer(Engine(model)) == "defg"
    assert "is a folder" in caplog.text


def test_a_cache_that_may_not_be_looked_at_does_not_stop_the_model(
    model: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else's folder. Root may look everywhere, so it is the calls that refuse."""
    Engine(model, CACHED).close()
    path = cache_path(model)

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def of_others(at: Any, *arguments: Any, **keywords: Any) -> Any:
            if str(at).startswith(str(path)):
                raise PermissionError(13, "Permission denied")
            return call(at, *arguments, **keywords)

        return of_others

    for name in ("stat", "open"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    assert answer(Engine(model)) == "defg"
    assert f"{path}: cannot be opened: Permission denied; it is made again" in caplog.text
    assert "loading without it" in caplog.text


def test_without_a_home_folder_there_is_no_cache_and_asking_for_one_is_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("ISTHMUS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert answer(Engine(model)) == "defg"
    with pytest.raises(UsageError, match="no home folder; set ISTHMUS_CACHE"):
        Engine(model, CACHED)


def test_a_stale_cache_that_cannot_be_replaced_does_not_stop_the_model(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Engine(model, CACHED).close()
    flip(4096)(cache_path(model))
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda path: full)
    assert answer(Engine(model)) == "defg"
    assert "needs 0 MiB" in caplog.text
    assert "loading without it" in caplog.text


def test_a_disk_that_fills_up_leaves_nothing(
    model: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        written.append(len(data))
        if len(written) > 3:
            raise OSError(28, "No space left on device")
        return len(data)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ModelFileError, match="No space left on device; it takes 0 MiB: make room"):
        Engine(model, CACHED)
    assert [p.suffix for p in cache_folder.iterdir()] == [".lock"]


@pytest.mark.parametrize("spare", [0, -1])
def test_a_limit_of_file_sizes_counts_for_what_is_written(
    model: Path, cache_folder: Path, spare: int
) -> None:
    """ulimit -f: of exactly the cache's size it is kept, of a byte less it is an error and leaves nothing."""
    with closing(open_weights(model)) as source:
        path = make_cache(source)
        size = path.stat().st_size
        path.unlink()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + spare, before[1]))
        try:
            if spare < 0:
                with pytest.raises(ModelFileError, match="File too large; it takes 0 MiB: make room"):
                    make_cache(source)
            else:
                make_cache(source)
                verify_cache(source)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.exists() == (spare == 0)
    assert not [p for p in cache_folder.iterdir() if p.suffix == ".partial"]


def test_an_interrupted_packing_leaves_nothing_and_the_next_one_works(
    model: Path, cache_folder: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with closing(open_weights(model)) as source:
        with pytest.raises(KeyboardInterrupt):
            make_cache(source, interrupt)
        assert [p.suffix for p in cache_folder.iterdir()] == [".lock"]
        make_cache(source)
        verify_cache(source)


def test_a_model_that_is_written_while_it_is_packed_gets_no_cache(model: Path, cache_folder: Path) -> None:
    def write(done: int, total: int) -> None:
        if done > total // 2:
            os.utime(model, ns=(1, 1))  # what any write to it changes

    with (
        closing(open_weights(model)) as source,
        pytest.raises(ModelFileError, match="changed while it was in"),
    ):
        make_cache(source, write)
    assert [p.suffix for p in cache_folder.iterdir()] == [".lock"]


def test_a_last_tensor_that_is_written_while_it_is_packed_gets_no_cache(
    model: Path, cache_folder: Path
) -> None:
    def write(done: int, total: int) -> None:
        if done == total:
            os.utime(model, ns=(1, 1))

    with (
        closing(open_weights(model)) as source,
        pytest.raises(ModelFileError, match="changed while it was in"),
    ):
        make_cache(source, write)
    assert [p.suffix for p in cache_folder.iterdir()] == [".lock"]


def test_two_processes_that_make_it_at_once_do_no_harm(model: Path, cache_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from isthmus.engine.engine import Engine\n"
        "from isthmus.config import RunOptions\n"
        "print(Engine(Path(sys.argv[1]), RunOptions(packed_cache=True)).info.name)"
    )
    command = [sys.executable, "-c", code, str(model)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == ["model", "model"]
    assert not [p for p in cache_folder.iterdir() if p.suffix == ".partial"]
    with closing(open_weights(model)) as source:
        verify_cache(source)
