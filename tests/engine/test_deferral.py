"""--defer-experts through the engine: said, checked, and the same answer whoever else asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.test_together import REQUESTS, same, small, write
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Output, Request, SamplingParams
from isthmus.errors import UsageError
from isthmus.models.base import load_model
from isthmus.modules.split import ExpertSplit
from isthmus.weights.source import open_weights
from models import tiny
from models.steps import prompt_of

TOP_K = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES["qwen3moe"]
    return tiny.write_case(tmp_path_factory.mktemp("tiny") / "tiny.gguf", case, tiny.build(case))


Make = Callable[..., Engine]


@pytest.fixture
def make(path: Path) -> Iterator[Make]:
    engines: list[Engine] = []

    def made(**options: Any) -> Engine:
        wanted = {"strategy": "hybrid", "device": "cpu", "threads": 2, "exact_batching": True} | options
        engines.append(Engine(path, RunOptions(**wanted)))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


def answers(engine: Engine, prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
    """Of requests that come two steps after each other."""
    given: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    waiting = list(enumerate(prompts))
    while waiting or engine.has_work:
        if waiting:
            index, prompt = waiting.pop(0)
            engine.add(Request(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=tokens)))
        for _ in range(2):
            for output in engine.step():
                assert output.error is None
                if output.token is not None:
                    given[output.request_id].append(output.token)
    return list(given.values())


PROMPTS = [prompt_of(length, tiny.VOCAB, length) for length in (5, 90, 1, 33)]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_does_not_depend_on_who_else_asks(make: Make, overlap: bool) -> None:
    alone = [answers(make(defer_experts=2), [prompt])[0] for prompt in PROMPTS]
    together = make(defer_experts=2, overlap=overlap, parallel=4)
    assert answers(together, PROMPTS) == alone
    assert alone != [answers(make(), [prompt])[0] for prompt in PROMPTS]


def test_what_a_cache_of_experts_holds_changes_no_answer(make: Make) -> None:
    """Late ones are late there too: else what others have asked would choose which of them are."""
    budget = 2 * 4 * 3 * 64 * 32 * 4  # four places in each layer for an expert of 64 x 32 in fp32
    alone = [answers(make(defer_experts=2), [prompt])[0] for prompt in PROMPTS]
    engine = make(defer_experts=2, expert_cache=budget, stream_rows=8, parallel=4)
    for _ in range(2):  # an empty cache, then one that has learnt
        assert answers(engine, PROMPTS) == alone
    use = engine.expert_use
    assert use is not None
    assert min(use.uploads, use.hits, use.streamed) > 0


def test_an_answer_is_not_found_as_the_beginning_of_a_prompt(make: Make) -> None:
    """What was computed with late experts is no prompt's: the prefix cache knows prompts alone."""
    engine, fresh, prompt = make(defer_experts=1), make(defer_experts=1), prompt_of(64, tiny.VOCAB, 0)
    longer = [*prompt, *answers(engine, [prompt], tokens=70)[0], 5]
    engine.add(Request("again", longer, SamplingParams(temperature=0.0, max_tokens=6)))
    outputs = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
    assert outputs[-1].num_cached_tokens == 64
    assert [output.token for output in outputs] == answers(fresh, [longer], tokens=6)[0]


def test_it_is_off_unless_asked_for_and_said_to_be_approximate(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert make().plan.notes == ()
        assert not caplog.messages
        engine = make(defer_experts=2)
    (note,) = engine.plan.notes
    assert note.startswith("approximate: of each sampled token 2 experts join a layer late")
    assert note in str(engine.plan)
    assert caplog.messages == [note]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"defer_experts": TOP_K}, r"defer_experts must be 1 to 2, fewer than the 3 experts .*, got 3"),
        ({"defer_experts": -1}, "defer_experts must be a whole number from 0"),
        ({"defer_experts": 1, "strategy": "cpu"}, "strategy cpu shares none: choose hybrid"),
        (
            {"defer_experts": 1, "strategy": "auto", "device": None},
            "strategy cpu was taken",
        ),
    ],
)
def test_what_it_cannot_be(make: Make, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make(**options)


@pytest.mark.parametrize("family", ["qwen3moe", "deepseek-v3"])
def test_giving_way_and_guessing_change_no_answer(family: str, tmp_path: Path) -> None:
    """Tokens of an answer that are computed again, in chunks of a prefill, or verified as drafts, have late
    experts as when they were decoded: bit for bit, in halves too."""
    source, requests = open_weights(write(family, tmp_path)), REQUESTS[:5]
    splits = [ExpertSplit("threaded", 512, exact=True, defer=2) for _ in range(2)]
    plain, cut = (
        load_model(source, RunOptions(threads=2, exact_batching=True, overlap=overlap), split=split)
        for overlap, split in zip((False, True), splits, strict=True)
    )
    alone: dict[str, list[Output]] = {}
    for request in requests:
        one = small(plain)
        one.add(request)
        alone |= one.run()
    together = small(cut, parallel=4, blocks=8, speculate=True)
    together.scheduler.keeps_answers = False
    together.add(*requests)
    answers = together.run()
    assert together.scheduler.num_preemptions > 0
    for name, events in answers.items():
        assert same(events) == same(alone[name])
    for split in splits:
        split.close()
