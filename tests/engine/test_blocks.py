"""The block manager: all or nothing, and no block lost or held twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.engine.blocks import BlockManager, blocks_for


def test_it_refuses_rather_than_overcommits() -> None:
    manager = BlockManager(4)
    first = manager.allocate(3)
    assert first is not None
    assert manager.allocate(2) is None
    assert manager.num_free == 1  # the refusal took nothing
    manager.free(first)
    assert manager.allocate(4) is not None


def test_a_block_cannot_be_given_back_twice() -> None:
    manager = BlockManager(2)
    blocks = manager.allocate(1)
    assert blocks is not None
    manager.free(blocks)
    with pytest.raises(AssertionError, match="given back twice"):
        manager.free(blocks)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 64) == blocks


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_every_block_is_free_or_held_by_one(num_blocks: int, moves: list[tuple[bool, int]]) -> None:
    manager = BlockManager(num_blocks)
    held: list[list[int]] = []
    for take, number in moves:
        if take:
            blocks = manager.allocate(number)
            if blocks is not None:
                held.append(blocks)
        elif held:
            manager.free(held.pop(number % len(held)))
        taken = [block for blocks in held for block in blocks]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(num_blocks))
        assert manager.num_free == num_blocks - len(taken)
