"""Fixtures that tests of several parts share."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphabet import write_alphabet_model
from isthmus import native


@pytest.fixture(scope="session", autouse=True)
def files_enough() -> None:
    """Models that tests drop keep their files mapped until Python collects all it has, which it does seldom
    beside so many objects: 1,100 at the end, more than many a system's soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 8192 if hard == resource.RLIM_INFINITY else min(8192, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))


@pytest.fixture(autouse=True)
def machine_restored() -> Iterator[None]:
    """A test may choose threads, nodes and the instruction set; the next one finds those of before."""
    isa, pool = native.current_isa(), (native.num_threads(), native.num_nodes())
    yield
    native.use_isa(isa)
    if (native.num_threads(), native.num_nodes()) != pool:
        native.set_threads(pool[0])


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """As the engine has it: rows of tiny models are no work for two, which would wait for one another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def alphabet_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the model of alphabet.py: each byte is followed by its successor."""
    return write_alphabet_model(tmp_path_factory.mktemp("alphabet") / "alphabet.gguf")
