"""Tiers below the prefix cache: what they keep, bring back and drop."""

import pytest

from engine.simulated import BLOCK, Below, World, scheduler
from isthmus.engine.prefix import Name


def tier_of(world: World) -> Below:
    assert world.below is not None
    return world.below


def with_prefix_below(below: Below) -> World:
    """18 zeros have been computed; then all 8 blocks were taken, and the tier alone has theirs."""
    world = World(scheduler(context=32, chunk=32, blocks=8), below)
    world.add([0] * 18, 1)
    world.step()
    assert len(tier_of(world).kept) == 4
    world.add([1] * 30, 1)
    world.step()
    assert world.s.prefixes.match([0] * 18, "", 17).names == []
    return world


def test_blocks_that_only_the_tier_has_are_read_as_far_as_they_are_there() -> None:
    world = with_prefix_below(Below())
    world.add([0] * 18, 1)
    sequence = world.alive[0]
    while world.alive:
        world.step()
    assert tier_of(world).num_read * BLOCK == sequence.num_cached > 0
    assert len(world.s.prefixes.match([0] * 18, "", 17).names) == 4  # read or computed, they are known again


def test_others_go_on_while_a_prefix_is_read_and_who_needs_the_same_waits_for_it() -> None:
    world = World(scheduler(context=32, chunk=32, running=3, blocks=16), Below(speed=0, damaged=256))
    world.add([0] * 18, 1)
    world.step()
    for first in (100, 200, 300):  # their 24 blocks take all 16
        world.add([first] * 30, 1)
    for _ in range(3):
        world.step()
    world.add([2] * 5, 20)
    world.step()
    world.add([0] * 18, 1)
    world.add([0] * 17, 1)
    decoding, loading, same = world.alive
    for _ in range(3):
        world.step()
    assert decoding.num_output_tokens == 4
    assert (world.s.loading, list(world.s.waiting)) == ([loading], [same])
    tier_of(world).bring(4)
    world.step()
    assert (loading.num_cached, same.num_cached) == (16, 16)
    assert loading.blocks[:4] == same.blocks[:4]
    assert tier_of(world).num_read == 4


def test_one_that_loads_has_a_place_among_those_that_run() -> None:
    world = World(scheduler(context=32, chunk=32, running=1, blocks=16), Below(speed=0, damaged=256))
    for first in (0, 1, 2):
        world.add([first] * 30, 1)
        world.step()
    world.add([0] * 18, 1)
    world.add([3] * 4, 1)
    world.s.schedule()
    assert ([world.alive[0]], [world.alive[1]]) == (world.s.loading, list(world.s.waiting))


def test_what_is_known_already_when_it_has_been_read_stays_the_known() -> None:
    world = World(scheduler(context=32, chunk=32, blocks=16), Below(damaged=256))
    world.add([0] * 18, 1)
    world.step()
    digests, names = list(tier_of(world).kept), list[Name]()
    known = world.s.prefixes.match([0] * 18, "", 16)
    blocks = world.s.blocks.allocate(4)
    assert blocks is not None
    world.s.prefixes.landed([0] * 18, "", digests, blocks, names)
    assert names == known.names
    world.s.blocks.free(blocks)
    assert world.s.prefixes.match([0] * 18, "", 16).blocks == known.blocks
    assert world.s.blocks.allocate(16) is not None  # all are forgotten, each once


@pytest.mark.parametrize("num_read", range(5))
def test_one_that_loads_is_cancelled_and_what_was_read_is_found_by_the_next(num_read: int) -> None:
    world = with_prefix_below(Below(speed=0, damaged=256))
    world.add([0] * 18, 1)
    world.s.schedule()
    assert world.s.loading == world.alive
    tier_of(world).bring(num_read)
    world.end(world.alive[0])
    assert world.s.blocks.num_free == 8
    world.check_blocks()
    assert len(world.s.prefixes.match([0] * 18, "", 17).names) == num_read


def test_one_that_loads_gives_way_to_an_older_one() -> None:
    world = World(scheduler(context=32, chunk=32, running=2, blocks=8), Below(speed=0, damaged=256))
    world.add([0] * 18, 1)
    world.step()
    world.add([1] * 30, 1)
    world.step()
    world.add([2] * 5, 27)
    world.step()  # 2 blocks
    world.add([0] * 18, 1)  # 5
    old, young = world.alive
    while young in world.s.loading or not old.num_output_tokens > 3:
        world.step()
        world.check_blocks()
    assert list(world.s.waiting) == [young]
    assert world.s.num_preemptions == 0  # it had computed nothing
    for _ in range(60):
        world.step()
    assert not world.alive


def test_what_was_dropped_while_it_was_read_is_not_used() -> None:
    world = with_prefix_below(Below(speed=0, damaged=256))
    world.add([0] * 18, 1)
    sequence = world.alive[0]
    world.s.schedule()
    tier_of(world).bring(4)
    tier_of(world).drop(sequence.below[2])
    world.step()
    assert sequence.num_cached == 8


def test_a_tier_of_evicted_blocks_gets_what_the_cache_gives_up_and_nothing_else() -> None:
    world = World(scheduler(context=32, chunk=32, blocks=8), Below(of_evicted=True, damaged=256))
    world.add([0] * 18, 1)
    world.step()
    assert not tier_of(world).kept
    world.add([1] * 18, 1)  # 5 of 8 blocks: 3 were free, and one that was not full
    world.step()
    assert len(tier_of(world).kept) == 1
    world.add([0] * 18, 1)
    sequence = world.alive[0]
    while world.alive:
        world.step()
    assert sequence.num_cached == 16


@pytest.mark.parametrize("failed", [False, True])
def test_what_failed_is_dropped_from_the_tier_too(failed: bool) -> None:
    world = World(scheduler(context=32, chunk=32), Below())
    world.add([0] * 18, 9)
    world.step()
    world.end(world.alive[0], failed=failed)
    assert len(tier_of(world).kept) == (0 if failed else 4)
