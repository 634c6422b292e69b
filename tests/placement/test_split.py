"""Layers over devices, against every split there is."""

from itertools import combinations_with_replacement, pairwise

from hypothesis import given
from hypothesis import strategies as st

from isthmus.placement.split import split_layers


def fullest(costs: list[int], capacities: list[int], first: int, last: int, cuts: tuple[int, ...]) -> float:
    """How full the fullest device is; above 1 the split does not fit."""
    edges = [0, *cuts, len(costs)]
    used = [sum(costs[a:b]) for a, b in pairwise(edges)]
    used[0] += first
    used[-1] += last
    pairs = list(zip(used, capacities, strict=True))
    return 2.0 if any(u > c for u, c in pairs) else max(u / c if u else 0.0 for u, c in pairs)


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=7),
    st.lists(st.integers(-5, 60), min_size=1, max_size=3),
    st.integers(0, 10),
    st.integers(0, 10),
)
def test_the_split_is_the_best_of_all_or_there_is_none(
    costs: list[int], capacities: list[int], first: int, last: int
) -> None:
    every = combinations_with_replacement(range(len(costs) + 1), len(capacities) - 1)
    best = min(fullest(costs, capacities, first, last, cuts) for cuts in every)
    got = split_layers(costs, capacities, first=first, last=last)
    if best > 1:
        assert got is None
        return
    assert got is not None
    assert [layer for block in got for layer in block] == list(range(len(costs)))
    assert len(got) == len(capacities)
    cuts = tuple(block.stop for block in got[:-1])
    assert fullest(costs, capacities, first, last, cuts) == best


def test_layers_go_by_free_memory() -> None:
    assert split_layers([1] * 12, [100, 200]) == [range(4), range(4, 12)]
    assert split_layers([1] * 4, [3, 3], first=2) == [range(1), range(1, 4)]
    assert split_layers([1] * 4, [3, 3], last=2) == [range(3), range(3, 4)]
    assert split_layers([3, 3], [5, 5]) == [range(1), range(1, 2)]
    assert split_layers([6, 3], [5, 5]) is None
