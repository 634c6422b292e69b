"""What happens to a cache, or to the file it is made of, while it is read ends a step, not the process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from engine.packed.kit import CACHED, answer
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.packed_cache import make_cache
from isthmus.errors import NotEnoughMemoryError
from isthmus.placement.machine import Machine
from isthmus.weights.packed_path import cache_path
from isthmus.weights.source import open_weights

STEPS = """
import os, sys
from pathlib import Path
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.weights.packed_path import cache_path
sys.path.insert(0, sys.argv[2])
from engine.packed.kit import answer
model = Path(sys.argv[1])
engine = Engine(model, RunOptions(packed_cache=True))
print(answer(engine))
os.truncate(cache_path(model), 4096)
print(answer(engine))
print(answer(engine))
"""


def test_a_cache_that_shrinks_between_steps_ends_the_step_and_not_the_process(model: Path) -> None:
    command = [sys.executable, "-c", STEPS, str(model), str(Path(__file__).parents[2])]
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
