"""Two halves of a step alternate: the bits of the whole, in an order that lets two devices work at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.config import MAX_CAPTURED_ROWS, RunOptions
from isthmus.engine.captured import CapturedStep, StepMemory
from isthmus.errors import HandoffError
from isthmus.models.base import Model, load_model
from isthmus.modules.split import DeviceExperts, ExpertSplit
from isthmus.native.handoff import Event, Threaded, abandoned_if_failing
from isthmus.native.ops import Experts
from isthmus.weights.source import open_weights
from models import tiny
from models.steps import Session, indices, prompt_of, whole

LAYERS = {"qwen3moe": [0, 1], "deepseek-v3": [1, 2]}  # with experts; deepseek's first is dense
SEQUENCES = 8
MAX_TOKENS = 128
PROMPT = prompt_of(100, tiny.VOCAB, 5)


@pytest.fixture(scope="module", params=LAYERS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES[request.param]
    return tiny.write_case(tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf", case, tiny.build(case))


def load(path: Path, split: ExpertSplit | None, *, exact: bool = True) -> Model:
    """Under overlap where there is a split."""
    options = RunOptions(threads=2, exact_batching=exact, overlap=split is not None)
    return load_model(open_weights(path), options, split=split)


@pytest.fixture
def split() -> Iterator[ExpertSplit]:
    made = ExpertSplit("threaded", max_rows=512, exact=True)
    yield made
    made.close()


def prefill_of_one(session: Session) -> list[Tensor]:
    """One sequence's chunk, whose second half attends to the keys of its first."""
    return session.step([(0, PROMPT)])


def mixed(session: Session) -> list[Tensor]:
    """Two decodes and two chunks, cut inside the first chunk."""
    return session.step([(0, [3]), (1, [4]), *((i, prompt_of(40, tiny.VOCAB, i)) for i in (2, 3))])


def decodes(session: Session) -> list[Tensor]:
    return [
        logits
        for count in range(2, SEQUENCES + 1)
        for logits in session.step([(i, [count + i]) for i in range(count)])
    ]


def captured(session: Session) -> list[Tensor]:
    """Decodes of 2 and of 5 sequences from their records, each run three times."""
    logits = []
    for count in (2, 5):
        with torch.inference_mode():
            batches = [session.batch([(i, [7 + i + turn]) for i in range(count)]) for turn in range(3)]
            record = CapturedStep(session.model, session.state, batches[0], StepMemory())
            assert record.foreign == []
            logits += [record.logits.clone(), *(record(indices(batch)).clone() for batch in batches[1:])]
    return logits


STEPS = [prefill_of_one, mixed, decodes, captured]


def run(model: Model) -> list[Tensor]:
    session = Session(model, SEQUENCES, MAX_TOKENS)
    return [logits for step in STEPS for logits in step(session)]


def test_the_halves_give_the_bits_of_the_whole(path: Path, split: ExpertSplit) -> None:
    wanted, got = run(load(path, None)), run(load(path, split))
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_the_halves_share_experts_with_the_device_to_the_bit(path: Path) -> None:
    """Experts 1 and 5 are the device's; each choice crosses as a row of its own then."""
    here = dict.fromkeys(LAYERS[path.stem], DeviceExperts(resident=(1, 5)))
    split = ExpertSplit("threaded", max_rows=512, exact=True, on_device=here)
    wanted, got = run(load(path, None)), run(load(path, split))
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert split.use().hits > 0
    split.close()


def test_each_half_hands_over_on_its_own(path: Path, split: ExpertSplit) -> None:
    """Twice the submits, the same rows; an option that is not heard makes no more than the whole does."""
    model, layers = load(path, split), LAYERS[path.stem]
    session = Session(model, SEQUENCES, MAX_TOKENS)
    prefill_of_one(session)
    assert split.handoff is not None
    counted = split.handoff.counters()
    assert counted.submits == counted.waits == 2 * len(layers)
    assert counted.bytes_x == counted.bytes_y == len(layers) * 100 * model.config.hidden * 4
    session.step([(0, [1])])  # one row cannot be cut
    assert split.handoff.counters().submits == 3 * len(layers)


@pytest.mark.parametrize("step", STEPS)
def test_the_second_half_submits_before_the_first_ones_result_is_waited_for(
    path: Path, split: ExpertSplit, step: Callable[[Session], list[Tensor]]
) -> None:
    model, layers = load(path, split), LAYERS[path.stem]
    session = Session(model, SEQUENCES, MAX_TOKENS)
    step(session)
    assert split.handoff is not None
    log = [event for event in split.handoff.take_events() if event.phase in ("submit", "wait")]
    log.sort(key=lambda event: event.begin_ns)
    steps = len(log) // (4 * len(layers))
    assert len(log) == 4 * len(layers) * steps > 0
    for begin in range(0, len(log), 4 * len(layers)):
        assert_alternating(log[begin : begin + 4 * len(layers)], layers)


def assert_alternating(log: list[Event], layers: list[int]) -> None:
    """submit A0, submit B0 | wait A0, submit A1 | wait B0, submit B1 | ... | wait A, wait B; A's slots are
    not B's."""
    of = {"submit": [], "wait": []}
    for event in log:
        of[event.phase].append(event)
    order = [(event.phase, event.layer) for event in log]
    wanted = [("submit", layers[0])] * 2
    for before, after in pairwise(layers):
        wanted += [("wait", before), ("submit", after)] * 2
    assert order == wanted + [("wait", layers[-1])] * 2
    assert [event.slot for event in of["submit"]] == [event.slot for event in of["wait"]]
    for first, second in zip(of["submit"][::2], of["submit"][1::2], strict=True):
        assert first.slot != second.slot


def test_a_model_that_looks_at_a_result_at_once_is_right_all_the_same(path: Path, split: ExpertSplit) -> None:
    """As a norm after the experts would: such a layer waits early, by itself."""
    model = load(path, split)
    wanted, layer = whole(model, PROMPT), model.layers[-1]  # type: ignore[attr-defined]
    plain = layer.ffn
    layer.ffn = lambda x, residual: torch.cat([plain(x, residual)]) * 1.0
    assert torch.equal(whole(model, PROMPT), wanted)


def test_other_drivers_for_fewer_rows_differ_by_rounding(path: Path, split: ExpertSplit) -> None:
    """Without exact_batching 100 rows are a GEMM's, and so may 50 of an expert's be, or not."""
    wanted, got = (
        torch.cat(prefill_of_one(Session(load(path, each, exact=False), 1, MAX_TOKENS)))
        for each in (None, split)
    )
    assert (got - wanted).norm() / wanted.norm() < 0.02
    assert MAX_CAPTURED_ROWS < 100


Spoil = Callable[[Tensor, Tensor], None]  # a router's ids and weights


def not_a_number(ids: Tensor, weights: Tensor) -> None:
    weights[-1, -1] = float("nan")


def nobody(ids: Tensor, weights: Tensor) -> None:
    """An exception of the CPU's worker."""
    ids[-1, -1] = 1000


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("spoil", "says"), [(not_a_number, "not finite"), (nobody, "1000")])
def test_a_fault_in_one_half_ends_the_step_by_name_and_the_next_one_works(
    path: Path, split: ExpertSplit, half: int, spoil: Spoil, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layer = load(path, split), LAYERS[path.stem][0]
    good = whole(model, PROMPT)
    ffn = model.layers[layer].ffn  # type: ignore[attr-defined]
    router = ffn.router

    def spoilt(x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = router(x)
        if split.lane == half:
            spoil(ids, weights)
        return ids, weights

    slots = len(split._slots)
    with monkeypatch.context() as during:
        during.setattr(ffn, "router", spoilt)
        with pytest.raises(HandoffError, match=f"layer {layer}.*{says}"), abandoned_if_failing(split.handoff):
            whole(model, PROMPT)
    assert torch.equal(whole(model, PROMPT), good)
    assert len(split._slots) == slots


def test_a_fault_in_a_record_ends_its_run_and_the_next_one_works(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half's failure leaves the second half's submission behind: the next run finds it dropped."""
    experts = remember_experts(monkeypatch)
    split = ExpertSplit("threaded", max_rows=512, exact=True)
    model, layer = load(path, split), LAYERS[path.stem][0]
    session = Session(model, 4, MAX_TOKENS)
    batches = [session.batch([(i, [7 + i]) for i in range(4)])] * 2
    with torch.inference_mode():
        record = CapturedStep(model, session.state, batches[0], StepMemory())
        good, handoff = record.logits.clone(), split.handoff
        assert isinstance(handoff, Threaded)
        handoff._native.set_pretended(layer, 0, "no such luck")
        with pytest.raises(HandoffError, match=f"layer {layer}.*no such luck"), abandoned_if_failing(handoff):
            record(indices(batches[1]))
        handoff.set_experts(layer, experts[layer])
        assert torch.equal(record(indices(batches[1])), good)
    split.close()


def remember_experts(monkeypatch: pytest.MonkeyPatch) -> dict[int, Experts]:
    """By layer, those that hand-offs are given from now on."""
    experts: dict[int, Experts] = {}
    set_experts = Threaded.set_experts

    def remembered(self: Threaded, layer: int, its: Experts) -> None:
        experts[layer] = its
        set_experts(self, layer, its)

    monkeypatch.setattr(Threaded, "set_experts", remembered)
    return experts


def test_a_time_out_ends_the_step_and_the_next_one_works(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half's experts wait behind the first's, which are too slow: neither is left."""
    experts = remember_experts(monkeypatch)
    split = ExpertSplit("threaded", max_rows=512, exact=True, settings={"timeout_s": 0.2})
    model, layer = load(path, split), LAYERS[path.stem][-1]
    good, threads = whole(model, PROMPT), len(os.listdir("/proc/self/task"))
    handoff = split.handoff
    assert isinstance(handoff, Threaded)
    handoff._native.set_pretended(layer, 300_000, "")  # us
    with pytest.raises(HandoffError, match="no result within 200 ms"), abandoned_if_failing(handoff):
        whole(model, PROMPT)
    handoff.set_experts(layer, experts[layer])
    assert torch.equal(whole(model, PROMPT), good)
    assert len(os.listdir("/proc/self/task")) == threads
    split.close()
    assert len(os.listdir("/proc/self/task")) == threads - 1  # the coordinator's
