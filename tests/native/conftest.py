"""Fixtures of the hand-off's tests; a file that changes the fake driver's settings makes its own `fake`."""

from collections.abc import Callable, Iterator

import pytest
from handoff_kit import FakeCuda, Side


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def make(fake: FakeCuda) -> Iterator[Callable[..., Side]]:
    """make(kind, **options) -> Side; all are closed at the end."""
    made: list[Side] = []

    def make(kind: str, **options: object) -> Side:
        made.append(Side(kind, fake, **options))
        return made[-1]

    yield make
    for side in made:
        side.close()
