"""The policy of the expert cache, simulated: what it keeps, and what it never does."""

from __future__ import annotations

import random
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.engine.expert_cache import ExpertCache
from isthmus.engine.lfru import HALF_LIFE, Lfru, Move

EXPERTS = 12


def step(policy: Lfru, *used: int) -> Move | None:
    """A step that chose these; the best move is made at once."""
    policy.observe({expert: used.count(expert) for expert in used})
    move = policy.propose()
    if move is not None:
        policy.begin(move)
        policy.finish(move.slot)
    return move


def test_free_places_are_taken_by_what_is_used() -> None:
    policy = Lfru(slots=range(3, 5), never=(0,))
    assert step(policy, 0) is None  # it is there anyway
    assert step(policy, 7) == Move(7, 3, None, float("inf"))
    assert step(policy, 7, 9) == Move(9, 4, None, float("inf"))
    assert policy.table() == {7: 3, 9: 4}


def test_a_place_goes_to_what_is_worth_twice_as_much_and_never_from_what_the_step_used() -> None:
    policy = Lfru(slots=[0])
    for _ in range(4):
        step(policy, 1)
    assert step(policy, 2) is None  # 1 use against 4
    assert step(policy, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2) is None  # 11 against 5, but 1 was used just now
    move = step(policy, 2)
    assert move is not None
    assert (move.expert, move.evicted) == (2, 1)


def test_uses_are_worth_half_as_much_after_each_half_life() -> None:
    policy = Lfru(slots=[0])
    for _ in range(8):
        step(policy, 1)
    for _ in range(4 * HALF_LIFE):  # 8 uses are worth half a one by then
        step(policy)
    move = step(policy, 2)
    assert move is not None
    assert move.evicted == 1
    assert 0.9 < move.gain < 1.1


def test_a_long_run_forgets_nothing_and_overflows_nothing() -> None:
    policy = Lfru(slots=[0])
    policy._step = 10**9
    step(policy, 1)
    policy._step += 10**9
    move = step(policy, 2)
    assert move is not None
    assert policy.table() == {2: 0}


def test_skewed_use_is_mostly_hits() -> None:
    """Of 64 experts whose use falls as 1/rank, 16 places hold about the 16 most used: 71 % of all uses."""
    rng, policy = random.Random(0), Lfru(slots=range(16))
    weights = [1 / rank for rank in range(1, 65)]
    best = sum(weights[:16]) / sum(weights)
    hits = total = 0
    for number in range(4000):
        used = tuple(set(rng.choices(range(64), weights, k=4)))
        if number >= 1000:
            hits, total = hits + sum(expert in policy.table() for expert in used), total + len(used)
        step(policy, *used)
    assert 0.6 < hits / total < best


class Device:
    """Slots of a device as the cache sees them; copies take `delay` steps. Asserts what must not be done."""

    expert_bytes = 10

    def __init__(self, slots: range, delay: int) -> None:
        self.table: dict[int, int] = {}
        self.content: dict[int, int] = {}
        self.copying: dict[int, int] = {}  # slot -> steps left
        self.slots, self.delay = slots, delay
        self.uses: Mapping[int, int] = {}
        self.uploads = 0

    def run(self, used: Mapping[int, int]) -> None:
        """A step: whatever the table names is there, whole, and nobody writes it meanwhile."""
        for expert, slot in self.table.items():
            assert self.content[slot] == expert
            assert slot not in self.copying
        self.uses = used
        self.copying = {slot: left - 1 for slot, left in self.copying.items()}

    def take_uses(self) -> Mapping[int, int]:
        return self.uses

    def leave(self, expert: int) -> None:
        del self.table[expert]

    def upload(self, slot: int, expert: int) -> None:
        assert slot in self.slots  # within the budget
        assert slot not in self.table.values()
        assert slot not in self.copying
        self.uploads += 1
        self.content[slot] = expert
        self.copying[slot] = self.delay

    def uploaded(self, slot: int) -> bool:
        return self.copying[slot] <= 0

    def enter(self, slot: int, expert: int) -> None:
        del self.copying[slot]
        assert self.content[slot] == expert
        assert expert not in self.table
        self.table[expert] = slot


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=4), max_size=60),
    num_slots=st.integers(1, EXPERTS),
    delay=st.integers(0, 3),
    layers=st.integers(1, 3),
    upload_bytes=st.sampled_from([1, 10, 25, 1000]),
)
def test_whatever_is_used_no_slot_is_overwritten_that_a_step_reads(
    steps: list[set[int]], num_slots: int, delay: int, layers: int, upload_bytes: int
) -> None:
    devices = {layer: Device(range(1, 1 + num_slots), delay) for layer in range(layers)}
    counted: list[int] = []
    cache = ExpertCache(
        {layer: (device, Lfru(device.slots, never=(0,))) for layer, device in devices.items()},
        counted.append,
        upload_bytes=upload_bytes,
    )
    for number, used in enumerate(steps):
        before = sum(device.uploads for device in devices.values())
        for layer, device in devices.items():
            device.run({(expert + layer) % EXPERTS: 1 for expert in used})
        cache.after_step(learns=number % 5 != 4)
        for device in devices.values():
            assert len(device.table) + len(device.copying) <= num_slots
            assert 0 not in device.content.values()
        copied = sum(device.uploads for device in devices.values()) - before
        assert copied <= (0 if number % 5 == 4 else max(1, upload_bytes // Device.expert_bytes))
    assert counted == [Device.expert_bytes] * sum(device.uploads for device in devices.values())


def test_a_step_that_is_no_decode_teaches_nothing() -> None:
    device = Device(range(2), delay=0)
    cache = ExpertCache({0: (device, Lfru(device.slots))}, lambda nbytes: None)
    device.run({3: 1})
    cache.after_step(learns=False)
    assert device.table == {}
    cache.after_step(learns=True)
    assert device.table == {3: 0}
