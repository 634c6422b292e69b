"""A model over a packed cache is the same model, bit for bit; a cache that is not its own is never used."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.config import RunOptions
from isthmus.engine import packed_cache
from isthmus.engine.engine import Engine
from isthmus.engine.packed_cache import make_cache, open_cache, verify_cache
from isthmus.engine.request import Request, SamplingParams
from isthmus.errors import ModelFileError, NotEnoughMemoryError, UsageError
from isthmus.models.base import load_model
from isthmus.placement.machine import Machine
from isthmus.weights.packed_path import cache_path
from isthmus.weights.source import open_weights
from models import tiny
from models.steps import Session

CACHED, PLAIN = RunOptions(packed_cache=True), RunOptions(packed_cache=False)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def model(tmp_path: Path, alphabet_model: Path) -> Path:
    return Path(shutil.copy(alphabet_model, tmp_path / "model.gguf"))


def answer(engine: Engine, prompt: str = "abc") -> str:
    engine.add(Request("a", list(prompt.encode()), SamplingParams(temperature=0.0, max_tokens=4)))
    text = b""
    while engine.has_work:
        for event in engine.step():
            if event.error:
                return event.error
            text += bytes([event.token]) if event.token is not None else b""
    return text.decode()


def packed_in_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are packed from here on."""
    from isthmus.modules import loader

    names: list[str] = []
    plain = loader.pack
    monkeypatch.setattr(loader, "pack", lambda raw: (names.append(raw.name), plain(raw))[1])
    return names


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


def flip(at: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return change


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


STEPS = """
import os, sys
from pathlib import Path
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.weights.packed_path import cache_path
sys.path.insert(0, sys.argv[2])
from engine.test_packed_cache import answer
model = Path(sys.argv[1])
engine = Engine(model, RunOptions(packed_cache=True))
print(answer(engine))
os.truncate(cache_path(model), 4096)
print(answer(engine))
print(answer(engine))
"""


def test_a_cache_that_shrinks_between_steps_ends_the_step_and_not_the_process(model: Path) -> None:
    command = [sys.executable, "-c", STEPS, str(model), str(Path(__file__).parent.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, *failed = done.stdout.splitlines()
    assert first == "defg"
    assert len(failed) == 2
    for line in failed:
        assert f"{cache_path(model)}: input/output error" in line


def test_a_cache_that_is_written_to_between_steps_ends_the_steps(model: Path) -> None:
    """In place and to the same size: no page is lost, and the answers would be other ones."""
    engine = Engine(model, CACHED)
    assert answer(engine) == "defg"
    with open(cache_path(model), "r+b") as file:
        file.seek(4096 + 1000)
        file.write(b"x")
    for prompt in ("abc", "b"):
        said = answer(engine, prompt)
        assert f"{cache_path(model)}: input/output error: the file was written to" in said
        assert "load the model again" in said
    assert answer(Engine(model)) == "defg"


def test_a_cache_that_is_made_again_or_removed_under_an_engine_does_it_no_harm(model: Path) -> None:
    """Its file has lost its name, not a byte."""
    engine = Engine(model, CACHED)
    with closing(open_weights(model)) as source:
        make_cache(source)
    assert answer(engine) == "defg"
    cache_path(model).unlink()
    assert answer(engine) == "defg"


def test_on_several_nodes_a_cache_that_is_written_to_is_no_longer_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, RunOptions(packed_cache=True, fake_numa=2, threads=2))
    os.utime(cache_path(model))
    assert answer(engine) == "defg"


@pytest.mark.parametrize(("nodes", "said"), [(2, "and one NUMA node"), (1, "GiB more")])
def test_who_lacks_memory_is_not_told_to_pack_what_is_packed(
    model: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, said: str
) -> None:
    """One node maps the cache already; two would copy it."""
    Engine(model, CACHED).close()
    full = replace(Machine.detect(), available_bytes=1)
    monkeypatch.setattr(Machine, "detect", lambda: full)
    with pytest.raises(NotEnoughMemoryError, match=said):
        Engine(model, RunOptions(fake_numa=nodes, threads=2))


LOADING = """
import os, sys
from pathlib import Path
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.errors import ModelFileError
from isthmus.modules import loader
model, plain = Path(sys.argv[1]), loader.pack
def cut_then_pack(raw):
    if raw.name == "output.weight":
        begin = model.read_bytes().index(bytes(raw.data))
        os.truncate(model, begin + len(raw.data) // 2)
    return plain(raw)
loader.pack = cut_then_pack
try:
    Engine(model, RunOptions(packed_cache=False))
except ModelFileError as error:
    print(error)
"""


def test_a_model_that_shrinks_while_it_is_packed_ends_the_load_and_not_the_process(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{model}: input/output error" in done.stdout
    assert "output.weight" in done.stdout
