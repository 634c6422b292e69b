"""Expert deferral: what transformers computes by the same rule, for sampled tokens, whoever is beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from isthmus.config import RunOptions
from isthmus.engine.batch import Batch
from isthmus.engine.captured import CapturedStep, StepMemory
from isthmus.errors import HandoffError
from isthmus.models.base import Model, load_model
from isthmus.modules.deferral import divided, divided_on, late_choices
from isthmus.modules.ring import ExpertRing
from isthmus.modules.split import DeviceExperts, ExpertSplit
from isthmus.modules.streamed import Streaming
from isthmus.native.handoff import abandoned_if_failing
from isthmus.weights.source import open_weights
from models import cases, tiny
from models.steps import Prompt, Session, indices, prompt_of

F32_BOUND = 1e-3  # of the logits' standard deviation, as in test_logits
LAYERS = 3  # with experts: what is late in the first two joins the second and the third
CASES = {
    "qwen3moe": tiny.Case(
        "qwen3moe",
        cases.gqa(hf.Qwen3MoeConfig, norm_topk_prob=True, num_hidden_layers=LAYERS, **cases.MOE),
    ),
    "deepseek-v3": tiny.Case(
        "deepseek2", cases.mla(hf.DeepseekV3Config, num_hidden_layers=1 + LAYERS, **cases.V3), cases.V3_KEYS
    ),
}
TOP_K = {"qwen3moe": 3, "deepseek-v3": 4}
PROMPT, ANSWER = prompt_of(20, tiny.VOCAB, 0), prompt_of(6, tiny.VOCAB, 1)


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(name: str) -> Any:
    return tiny.build(CASES[name])


@pytest.fixture(scope="module")
def path(name: str, reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_case(tmp_path_factory.mktemp("tiny") / "tiny.gguf", CASES[name], reference)


Load = Callable[..., tuple[Model, ExpertSplit]]


@pytest.fixture
def load(path: Path) -> Iterator[Load]:
    splits: list[ExpertSplit] = []

    def loaded(defer: int, place: Any = dict, **options: Any) -> tuple[Model, ExpertSplit]:
        """place: makes what an ExpertSplit is told of experts on the device."""
        wanted = {"threads": 2, "exact_batching": True, "kv_dtype": "f32"} | options
        run_options = RunOptions(**wanted)
        exact = run_options.exact_batching
        splits.append(ExpertSplit("threaded", 512, exact=exact, defer=defer, **place()))
        return load_model(open_weights(path), run_options, split=splits[-1]), splits[-1]

    yield loaded
    for split in splits:
        split.close()


def batch_of(session: Session, pieces: list[tuple[int, Prompt]], sampled: list[bool]) -> Batch:
    """sampled: by piece."""
    flags = [flag for (_, tokens), flag in zip(pieces, sampled, strict=True) for _ in tokens]
    return replace(session.batch(pieces), sampled=torch.tensor(flags).int())


def step(session: Session, pieces: list[tuple[int, Prompt]], sampled: list[bool]) -> list[Tensor]:
    with torch.inference_mode():
        logits = session.model.forward(batch_of(session, pieces, sampled), session.state)
    return list(logits.split([len(tokens) for _, tokens in pieces]))


def answered(model: Model) -> Tensor:
    """Logits of PROMPT in one step, then of ANSWER token by token."""
    session = Session(model, 1)
    logits = step(session, [(0, PROMPT)], [False])
    for token in ANSWER:
        logits += step(session, [(0, [token])], [True])
    return torch.cat(logits)


def with_deferral(model: Any, defer: int) -> Tensor:
    """transformers over all tokens at once: of a sampled token's experts the `defer` of lowest weight are
    taken out of their layer's sum, and added to the next one's that has experts; not in the last."""
    moe = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    rows, left = len(PROMPT) + len(ANSWER), [torch.zeros(())]
    sampled = torch.arange(rows) >= len(PROMPT)

    def patched(experts: Any, is_last: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        plain = experts.forward

        def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            late = torch.zeros_like(weights, dtype=torch.bool)
            late.scatter_(1, weights.argsort(dim=1)[:, :defer], True)
            late &= (sampled & torch.tensor(not is_last))[:, None]
            owed, left[0] = left[0], plain(x, ids, weights * late)
            return plain(x, ids, weights * ~late) + owed

        return forward

    for index, mlp in enumerate(moe):
        mlp.experts.forward = patched(mlp.experts, index == len(moe) - 1)
    try:
        with torch.no_grad():
            return model(torch.tensor([PROMPT + ANSWER])).logits[0]
    finally:
        for mlp in moe:
            del mlp.experts.forward


def resident() -> dict[str, Any]:
    """Three experts of each layer that may have some are on the device, those of the last one too."""
    return {"on_device": {layer: DeviceExperts((1, 6, 3)) for layer in range(LAYERS + 1)}}


def streaming() -> dict[str, Any]:
    """Of a step of more than 32 rows those experts stream that 12 rows chose."""
    return {"streaming": Streaming(12), "ring": ExpertRing(stages=3, size=2)}


def both() -> dict[str, Any]:
    return resident() | streaming()


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.std())


@pytest.mark.parametrize("most", [False, True])
def test_logits_are_those_of_transformers_with_the_same_rule(
    name: str, reference: Any, load: Load, most: bool
) -> None:
    defer = TOP_K[name] - 1 if most else 1
    model, _ = load(defer, exact_batching=False)
    wanted = with_deferral(reference, defer)
    assert distance(answered(model), wanted) <= F32_BOUND
    plain = with_deferral(reference, 0)
    assert distance(plain[: len(PROMPT)], wanted[: len(PROMPT)]) <= F32_BOUND
    assert distance(plain[len(PROMPT) :], wanted[len(PROMPT) :]) > 10 * F32_BOUND  # so that this can fail


def test_a_prompt_is_as_without_and_what_is_late_is_a_submission_of_its_own(load: Load) -> None:
    """Two chunks of a prompt have no late experts; a decode has them in all layers but the last."""
    (plain, _), (model, split) = load(0), load(1)
    sessions = [Session(each, 1) for each in (plain, model)]
    for tokens in (prompt_of(40, tiny.VOCAB, 3), prompt_of(41, tiny.VOCAB, 4)):
        wanted, got = (step(session, [(0, tokens)], [False])[0] for session in sessions)
        assert torch.equal(got, wanted)
    assert split.handoff is not None
    assert split.handoff.counters().submits == 2 * LAYERS
    wanted, got = (step(session, [(0, ANSWER[:1])], [True])[0] for session in sessions)
    assert not torch.equal(got, wanted)
    assert split.handoff.counters().submits == split.handoff.counters().waits == 2 * LAYERS + 2 * LAYERS - 1


@pytest.mark.parametrize("place", [resident, streaming, both])
def test_a_late_expert_is_late_wherever_it_is(load: Load, place: Any) -> None:
    """Experts on the device, and a step in which answers stand beside a prompt and experts stream: the bits
    of the CPU alone under exact_batching; else as close as the rounding of partial sums."""
    steps = [
        ([(0, PROMPT), (1, PROMPT[:9])], [False, False]),
        ([(0, ANSWER[:1]), (1, ANSWER[1:2]), (2, prompt_of(40, tiny.VOCAB, 5))], [True, True, False]),
        ([(0, ANSWER), (1, prompt_of(34, tiny.VOCAB, 6))], [True, True]),  # computed again, in chunks
        ([(0, [3]), (2, [4])], [True, True]),
    ]
    for exact, bound in ((True, 0.0), (False, 1e-4)):
        logits, placed = [], None
        for how in (dict, place):
            model, placed = load(2, how, exact_batching=exact)
            session = Session(model, 3)
            logits.append(torch.cat([part for one in steps for part in step(session, *one)]))
        assert distance(*logits) <= bound
        use = placed.use()
        assert use.hits > 0
        assert use.misses > 0
        assert (use.streamed > 0) == (place is not resident)
    plain = Session(load(0)[0], 3)
    assert distance(torch.cat([part for one in steps for part in step(plain, *one)]), logits[0]) > 0.01


@pytest.mark.parametrize("place", [dict, resident, both])
@pytest.mark.parametrize("overlap", [False, True])
def test_neighbours_do_not_matter(load: Load, overlap: bool, place: Any) -> None:
    """A sequence's decodes alone, among four others, and beside chunks of prompts: the same bits."""
    alone = answered(load(2)[0])[len(PROMPT) :]
    model, _ = load(2, place, overlap=overlap)
    session = Session(model, 6)
    step(session, [(i, PROMPT) for i in range(5)], [False] * 5)
    for at, token in enumerate(ANSWER):
        pieces = [(i, [token if i == 0 else 7 + i]) for i in range(5)]
        flags = [True] * 5
        if at % 2:  # of more than 32 rows, and with one sequence whose last prompt token stands alone
            pieces, flags = (
                [*pieces[:2], (5, prompt_of(40 - at, tiny.VOCAB, at)), (4, [3])],
                [True, True, False, False],
            )
        assert torch.equal(step(session, pieces, flags)[0], alone[at : at + 1])


@pytest.mark.parametrize("place", [dict, resident])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_record_gives_the_models_bits_whichever_rows_are_sampled(
    load: Load, overlap: bool, place: Any
) -> None:
    model = load(1, place, overlap=overlap)[0]
    plain = load(1)[0]
    sessions = [Session(each, 3) for each in (model, plain)]
    for session in sessions:
        step(session, [(i, PROMPT) for i in range(3)], [False] * 3)
    flags = ([True, False, True], [True, True, True], [False, True, True])
    decodes = [([(i, [turn + i]) for i in range(3)], those) for turn, those in enumerate(flags)]
    wanted = [torch.cat(step(sessions[1], *decode)) for decode in decodes]
    batches = [batch_of(sessions[0], *decode) for decode in decodes]
    with torch.inference_mode():
        record = CapturedStep(model, sessions[0].state, batches[0], StepMemory())
        assert record.foreign == []
        got = [record.logits.clone(), *(record(indices(batch)).clone() for batch in batches[1:])]
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_the_last_layer_of_experts_has_none_that_are_late(tmp_path: Path) -> None:
    """Of one layer of experts it is the last: nothing changes."""
    case = tiny.Case(
        "qwen3moe", cases.gqa(hf.Qwen3MoeConfig, num_hidden_layers=1, norm_topk_prob=True, **cases.MOE)
    )
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))
    splits = [ExpertSplit("threaded", 512, defer=defer) for defer in (0, 2)]
    models = [load_model(open_weights(path), RunOptions(threads=2), split=split) for split in splits]
    assert torch.equal(*(answered(model) for model in models))
    for split in splits:
        split.close()


def test_a_fault_of_a_late_expert_ends_its_step_by_name_and_the_next_one_works(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, split = load(1)
    session = Session(model, 1)
    step(session, [(0, PROMPT)], [False])
    ffn = next(layer.ffn for layer in model.layers if hasattr(layer.ffn, "router"))  # type: ignore[attr-defined]
    router, layer = ffn.router, min(split._slots, key=lambda key: key[2])[2]

    def spoilt(x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = router(x)
        ids[0, int(weights[0].argmin())] = 1000
        return ids, weights

    good = step(session, [(0, [1])], [True])[0]
    session.lengths[0] -= 1
    with monkeypatch.context() as during:
        during.setattr(ffn, "router", spoilt)
        with pytest.raises(HandoffError, match=f"layer {layer}.*1000"), abandoned_if_failing(split.handoff):
            step(session, [(0, [1])], [True])
    session.lengths[0] -= 1
    assert torch.equal(step(session, [(0, [1])], [True])[0], good)


def test_the_choices_of_lowest_weight_are_late_and_of_equal_ones_those_further_back() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    weights = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25], [0.4, 0.1, 0.3, 0.2]])
    sampled = torch.tensor([1, 1, 0], dtype=torch.int32)
    late = late_choices(weights, sampled, 2)
    for now, later in (divided(ids, weights, sampled, 2), divided_on(ids, late)):
        assert now.tolist() == [[5, -1, 7, -1], [1, 2, -1, -1], [5, 6, 7, 8]]
        assert later.tolist() == [[-1, 6, -1, 8], [-1, -1, 3, 4], [-1, -1, -1, -1]]
        assert now.dtype == later.dtype == torch.int32
