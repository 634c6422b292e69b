from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Server, serving
from serve_process import Serve, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engine steps as fast as it can."""
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Server]:
    """A server whose engine makes a step only when the test grants one."""
    with serving(tmp_path, gated=True) as running:
        yield running


@pytest.fixture(scope="session")
def demo() -> Iterator[Serve]:
    """`isthmus serve demo`: a real engine and model; exact, so cached and cold give the same text."""
    with serve("demo", "--ctx", "1024", "--exact-batching") as running:
        running.wait_ready()
        yield running
