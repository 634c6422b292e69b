"""A pool of pages read as a longer view: the same bytes as the pool written out again and again."""

import gc
import mmap

import numpy as np
import pytest

from isthmus.weights.repeated import RepeatedPool

PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def data() -> bytes:
    return np.random.default_rng(0).integers(0, 256, 3 * PAGE, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("start", [0, PAGE, 2 * PAGE])
@pytest.mark.parametrize("length", [1, PAGE - 1, 3 * PAGE, 10 * PAGE + 17])
def test_a_view_is_the_pool_over_and_over(data: bytes, start: int, length: int) -> None:
    view = RepeatedPool(memoryview(data)).view(start, length)
    assert bytes(view) == (data * 5)[start : start + length]
    assert view.readonly


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("isthmus-pool" in line for line in maps)


def test_a_view_keeps_its_mapping_alive_and_takes_it_along(data: bytes) -> None:
    gc.collect()
    before = mappings()
    view = RepeatedPool(memoryview(data)).view(0, 9 * PAGE)  # the pool itself is gone now
    part = view[PAGE : 2 * PAGE]
    del view
    gc.collect()
    assert mappings() > before
    assert bytes(part) == data[PAGE : 2 * PAGE]
    del part
    gc.collect()
    assert mappings() == before


@pytest.mark.parametrize(("start", "length"), [(1, 1), (-PAGE, 1), (3 * PAGE, 1), (0, 0)])
def test_a_view_begins_at_a_page_of_the_pool(data: bytes, start: int, length: int) -> None:
    with pytest.raises(ValueError, match="of a pool of"):
        RepeatedPool(memoryview(data)).view(start, length)


def test_a_pool_is_whole_pages(data: bytes) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        RepeatedPool(memoryview(data)[:-1])
