"""The sampler against the definition over the whole sorted vocabulary, and the penalties by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.engine.request import SamplingParams
from isthmus.engine.sampler import (
    Sampler,
    SamplingError,
    argmax,
    check_finite,
    greedy,
    largest,
    sample_rows,
    survivors,
)


def by_definition(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, float]:
    """id -> probability, written down plainly: sort everything, keep k, keep the nucleus, keep min_p."""
    values = logits.double().numpy()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    kept = order[: top_k or len(order)]
    weights = np.exp((values[kept] - values[kept[0]]) / temperature)
    share = weights / weights.sum()
    before = np.concatenate([[0.0], np.cumsum(share)[:-1]])
    chosen = [
        (i, w)
        for i, w, mass in zip(kept, weights, before, strict=True)
        if (top_p == 1 or mass < top_p) and w >= min_p
    ]
    total = sum(w for _, w in chosen)
    return {i: w / total for i, w in chosen}


def distribution(logits: Tensor, *filters: float) -> dict[int, float]:
    ids, weights = survivors(logits, *filters)  # type: ignore[arg-type]
    return dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))


# Sharp (the pool settles it), flat (a nucleus of thousands: the pool must grow), and with ties at every edge.
SHARP = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 4
FLAT = torch.randn(50_000, generator=torch.Generator().manual_seed(2)) * 0.1
TIED = torch.randint(0, 12, (5_000,), generator=torch.Generator().manual_seed(3)).float()
SMALL = torch.tensor([0.0, 3.0, 1.0, 3.0, -2.0])


@pytest.mark.parametrize("logits", [SHARP, FLAT, TIED, SMALL], ids=["sharp", "flat", "tied", "small"])
@pytest.mark.parametrize(
    "filters",
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 40, 0.95, 0.05),
        (1.0, 0, 0.9, 0.0),
        (1.3, 0, 0.999, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 700, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (5.0, 0, 0.5, 0.01),
        (1.0, 1_000_000, 1.0, 0.0),
    ],
)
def test_the_survivors_are_those_of_the_definition(
    logits: Tensor, filters: tuple[float, int, float, float]
) -> None:
    expected = by_definition(logits, *filters)
    got = distribution(logits, *filters)
    # A token right at the edge of the nucleus may fall either way by rounding.
    differing = got.keys() ^ expected.keys()
    assert len(differing) <= 1
    assert sum(expected.get(i, got.get(i, 0.0)) for i in differing) < 1e-4
    worst = max(abs(got[i] - expected[i]) for i in got.keys() & expected.keys())
    assert worst < (1e-4 if differing else 1e-6)  # weights are fp32


# Weights of 1 down to 2^-15 in fp32: 60 of them have an exact sum in double, in any order. Two share a bin of
# the selection.
LOGITS = [0.0, -0.7, -1.0, -1.0001, -10.0, -math.inf]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(LOGITS), min_size=1, max_size=59),
    st.floats(2**-20, 1, exclude_max=True, width=32),
)
def test_a_nucleus_is_the_head_of_a_stable_sort_that_reaches_the_mass(
    values: list[float], share: float
) -> None:
    logits = torch.tensor([*values, 0.0])
    weights = survivors(logits, 1.0, 0, 1.0, 0.0)[1].tolist()  # all, in the order of ids
    mass, reached, expected = share * sum(weights), 0.0, []
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        if reached >= mass:
            break
        expected.append(i)
        reached += weights[i]
    ids, kept = survivors(logits, 1.0, 0, share, 0.0)
    assert sorted(ids.tolist()) == sorted(expected)
    assert kept.tolist() == [weights[i] for i in ids.tolist()]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=400), st.integers(1, 400))
def test_largest_is_the_head_of_a_stable_sort(values: list[int], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert largest(torch.tensor(values).float(), min(count, len(values)))[1].tolist() == expected


def test_a_large_vocabulary_is_never_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort of 152k logits takes 20 ms, a selection of the largest 0.5."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("sorted")

    for name in ("sort", "argsort", "topk"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
        monkeypatch.setattr(torch, name, refuse)
    logits = torch.randn(152_064, generator=torch.Generator().manual_seed(4))
    for params in (SamplingParams(top_p=0.9), SamplingParams(top_k=40), SamplingParams(min_p=0.1)):
        Sampler(params, [], len(logits)).sample(logits)


def test_greedy_takes_the_largest_and_the_lower_id_of_equals() -> None:
    assert Sampler(SamplingParams(temperature=0.0), [], 5).sample(SMALL) == 1
    assert Sampler(SamplingParams(temperature=1e-6), [], 5).sample(SMALL) == 1


def test_draws_follow_the_distribution() -> None:
    """ln 1, ln 2, ln 5: an eighth, a quarter, five eighths; within 3 standard errors of 4,000 draws."""
    logits = torch.tensor([1.0, 2.0, 5.0]).log()
    chooser = Sampler(SamplingParams(seed=0), [], 3)
    counts = np.bincount([chooser.sample(logits) for _ in range(4000)], minlength=3) / 4000
    for got, expected in zip(counts, [1 / 8, 2 / 8, 5 / 8], strict=True):
        assert abs(got - expected) < 3 * math.sqrt(expected * (1 - expected) / 4000)


def test_a_seed_repeats_and_another_differs() -> None:
    def draws(seed: int | None) -> list[int]:
        chooser = Sampler(SamplingParams(seed=seed, top_p=0.9), [], len(FLAT))
        return [chooser.sample(FLAT) for _ in range(8)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(None) != draws(None)


def test_the_repetition_penalty_counts_prompt_and_answer() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    chooser = Sampler(params, prompt=[0], vocab_size=4)
    logits = torch.tensor([3.0, 2.0, 1.4, -1.0])  # 3 / 2 = 1.5 < 2
    assert chooser.sample(logits) == 1
    assert chooser.sample(logits) == 0  # 1.5 against 2 / 2 and 1.4
    negative = torch.tensor([-1.0, -1.0, -1.5, -5.0])  # seen and below 0: multiplied, -2
    assert chooser.sample(negative) == 2


def test_frequency_counts_each_time_and_presence_once() -> None:
    frequency = Sampler(SamplingParams(temperature=0.0, frequency_penalty=1.0), [0, 0, 0], 2)
    logits = torch.tensor([2.5, 0.0])
    assert [frequency.sample(logits) for _ in range(4)] == [
        0,
        0,
        0,
        1,
    ]  # 2.5, 1.5, 0.5, -0.5; the prompt is free
    presence = Sampler(SamplingParams(temperature=0.0, presence_penalty=1.0), [], 2)
    assert [presence.sample(logits) for _ in range(4)] == [0, 0, 0, 0]  # 2.5, then 1.5 for ever


def test_logit_bias_forces_and_bans() -> None:
    assert Sampler(SamplingParams(temperature=0.0, logit_bias={4: 100.0}), [], 5).sample(SMALL) == 4
    banned = Sampler(SamplingParams(temperature=0.0, logit_bias={1: -100.0, 3: -100.0}), [], 5)
    assert banned.sample(SMALL) == 2


def test_the_logits_given_are_not_changed() -> None:
    logits = SMALL.clone()
    Sampler(SamplingParams(repetition_penalty=2.0, logit_bias={1: -5.0}, top_p=0.5), [1], 5).sample(logits)
    assert torch.equal(logits, SMALL)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error_not_random_text(bad: float) -> None:
    logits = torch.zeros(3, 1000)
    check_finite(logits)
    logits[1, 567] = bad
    check_finite(logits[0])
    for spoilt in (logits, logits[1]):
        with pytest.raises(SamplingError, match="not finite"):
            check_finite(spoilt)


@pytest.mark.parametrize("params", [SamplingParams(seed=1), SamplingParams(seed=1, top_k=4, top_p=0.9)])
def test_a_forbidden_token_is_never_drawn(params: SamplingParams) -> None:
    logits = torch.full((8,), -math.inf)
    logits[3] = 0.0
    chooser = Sampler(params, [], 8)
    assert {chooser.sample(logits) for _ in range(200)} == {3}


def test_a_point_just_before_the_end_stays_within_what_may_be_drawn() -> None:
    """The last id has weight 0 here; the draw below is the largest there is."""
    logits = torch.tensor([0.0, 0.1, -math.inf])
    chooser = Sampler(SamplingParams(seed=1), [], 3)
    chooser._random.random = lambda: math.nextafter(1.0, 0.0)  # type: ignore[method-assign]
    assert chooser.sample(logits) == 1


def test_nothing_is_chosen_where_nothing_may_be() -> None:
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(top_k=2)):
        assert Sampler(params, [], 5).sample(torch.full((5,), -math.inf)) == -1


def test_rows_together_are_rows_alone() -> None:
    """Of all kinds: greedy, penalised, drawn with each filter; 20 tokens of each."""
    ways = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, repetition_penalty=2.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.9, frequency_penalty=1.0),
        SamplingParams(seed=3, top_k=5, logit_bias={3: 9.0}),
        SamplingParams(seed=4, min_p=0.1, temperature=1.7),
    ]
    torch.manual_seed(5)
    steps = [torch.randn(len(ways), 300) * 2 for _ in range(20)]
    together = [Sampler(params, [1, 2], 300) for params in ways]
    got = [sample_rows(list(zip(together, step, strict=True))) for step in steps]
    for at, params in enumerate(ways):
        alone = Sampler(params, [1, 2], 300)
        assert [alone.sample(step[at]) for step in steps] == [tokens[at] for tokens in got]


@given(st.lists(st.floats(-120.0, 0.0, width=32), min_size=1, max_size=40), st.floats(0.1, 10.0))
def test_weights_are_the_exponentials(values: list[float], temperature: float) -> None:
    logits = torch.tensor([*values, 0.0])
    ids, weights = survivors(logits, temperature, 0, 1.0, 0.0)
    wanted = (logits.double() / torch.tensor(temperature).double()).exp()
    assert ids.tolist() == list(range(len(logits)))
    assert torch.allclose(weights.double(), wanted, rtol=2e-5, atol=1e-37)


def test_the_largest_of_each_row_is_found_in_one_call() -> None:
    rows = torch.stack([SMALL, SMALL.flip(0)])
    assert argmax(rows) == greedy(rows) == [1, 1]
    rows[1, 2] = -math.inf
    assert argmax(rows) == [1, 1]
    assert greedy(rows) is None
