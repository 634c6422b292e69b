"""Log-probabilities of prompts: right, and from logits of a few rows at a time however long the prompt is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor

from engine.stand_in import run as run_engine
from engine.stand_in import runner_of, start
from isthmus.config import BLOCK_TOKENS, PROMPT_LOGIT_ROWS, RunOptions
from isthmus.engine import indices as indices_module
from isthmus.engine import loop as loop_module
from isthmus.engine.loop import StepLoop
from isthmus.engine.request import Output, Request, SamplingParams, TokenLogprob
from isthmus.engine.runner import LaterLogits, Runner
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.state import State
from isthmus.models.base import Model
from isthmus.placement.machine import Machine
from isthmus.placement.plan import plan
from isthmus.weights.dummy import DummySource
from models import cases, tiny
from models.steps import load, prompt_of, whole


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for 8192 tokens, as it says."""
    long = cases.gqa(hf.Qwen3MoeConfig, **cases.MOE, norm_topk_prob=True, max_position_embeddings=8192)
    case = replace(tiny.CASES["qwen3moe"], config=long)
    model = tiny.round_to_bf16(tiny.build(case))
    return tiny.write_case(tmp_path_factory.mktemp("tiny") / "tiny.gguf", case, model)


@pytest.fixture(scope="module")
def exact(path: Path) -> Model:
    return load(path, exact_batching=True, kv_dtype="bf16")


class Watched:
    """A loop over a model, with the rows of each product with its head."""

    def __init__(
        self, model: Model, context: int, *, blocks: int = 0, chunk: int = 512, parallel: int = 1
    ) -> None:
        blocks = blocks or parallel * -(-context // BLOCK_TOKENS)
        state = State(model.state_spec(), blocks, model.kv_dtype)
        scheduler = Scheduler(blocks, BLOCK_TOKENS, context, chunk, parallel)
        self.runner = Runner(model, state, BLOCK_TOKENS)
        self.loop = StepLoop(self.runner, scheduler, tiny.VOCAB)

    def run(self, *requests: Request) -> dict[str, list[Output]]:
        for request in requests:
            self.loop.add(request)
        events: dict[str, list[Output]] = {}
        while self.loop.has_work:
            for output in self.loop.step():
                events.setdefault(output.request_id, []).append(output)
        return events


@pytest.fixture
def head_rows(exact: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product with the model's head from here on."""
    rows, head = [], exact.head  # type: ignore[attr-defined]

    def watched(x: Tensor) -> Tensor:
        rows.append(len(x))
        return head(x)

    monkeypatch.setattr(exact, "head", watched)
    return rows


def scoring(name: str, prompt: list[int], tokens: int = 1) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=tokens, prompt_logprobs=2))


def told_of(events: Sequence[Output]) -> list[TokenLogprob]:
    (told,) = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    assert told[0] is None
    return [each for each in told if each is not None]


def test_a_prompt_of_4k_never_has_its_logits_in_memory_at_once(exact: Model, head_rows: list[int]) -> None:
    """Its steps are whole chunks. The oracle: the softmax of a single pass over all of it."""
    prompt = prompt_of(4097, tiny.VOCAB, seed=5)
    watched = Watched(exact, 4160)
    told = told_of(watched.run(scoring("a", prompt))["a"])
    assert watched.loop.stats().steps == 9
    assert max(head_rows) == PROMPT_LOGIT_ROWS == 64
    assert sum(head_rows) == 4097  # each once
    head_rows.clear()
    wanted = whole(exact, prompt).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert [each.token for each in told] == prompt[1:]
    torch.testing.assert_close(torch.tensor([each.logprob for each in told]), wanted, rtol=0, atol=2e-5)


REQUESTS = [
    *(scoring(f"told {n}", prompt_of(n, tiny.VOCAB, seed=n), tokens=3) for n in (150, 65, 200, 20)),
    *(
        Request(
            f"plain {n}", prompt_of(n, tiny.VOCAB, seed=n), SamplingParams(seed=n, max_tokens=40, logprobs=5)
        )
        for n in (30, 90)
    ),
]


def test_told_beside_others_as_alone(exact: Model, head_rows: list[int]) -> None:
    """Bit for bit, in steps that mix them with decodes."""
    alone: dict[str, list[Output]] = {}
    for request in REQUESTS:
        alone |= Watched(exact, 256).run(request)
    head_rows.clear()
    together = Watched(exact, 256, chunk=128, parallel=6)
    answers = together.run(*REQUESTS)
    for name, events in answers.items():
        plain = [replace(event, num_cached_tokens=0) for event in events]
        assert plain == [replace(event, num_cached_tokens=0) for event in alone[name]], name
    assert max(head_rows) <= PROMPT_LOGIT_ROWS


def test_what_was_told_before_giving_way_is_not_told_again(exact: Model) -> None:
    """The other takes its third block when of 200 rows 150 or so are told."""
    first = Request(
        "first", prompt_of(5, tiny.VOCAB, seed=1), SamplingParams(temperature=0.0, max_tokens=130)
    )
    second = scoring("second", prompt_of(200, tiny.VOCAB, seed=2), tokens=2)
    alone = Watched(exact, 256).run(second)["second"]
    crowded = Watched(exact, 256, blocks=6, chunk=6, parallel=2)
    assert crowded.run(first, second)["second"] == alone
    assert crowded.loop.stats().preemptions == 1


@pytest.mark.parametrize("fault", ["nan", "error"])
def test_a_fault_in_a_piece_ends_its_request_alone(
    exact: Model, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    watched = Watched(exact, 256, chunk=200, parallel=2)
    execute, calls = watched.runner.execute, []

    def spoiled(rows: slice | list[int], whole: LaterLogits) -> Tensor:
        calls.append(rows)
        if len(calls) != 2:
            return whole[rows]
        if fault == "error":
            raise RuntimeError("out of memory")
        return torch.full_like(whole[rows], float("nan"))

    def spoiling(plan: object) -> Tensor | LaterLogits:
        logits = execute(plan)  # type: ignore[arg-type]
        if isinstance(logits, Tensor):
            return logits
        return LaterLogits(len(logits), lambda rows: spoiled(rows, logits))

    monkeypatch.setattr(watched.runner, "execute", spoiling)
    events = watched.run(REQUESTS[0], REQUESTS[4])
    (failed,) = events["told 150"]
    assert failed.finish_reason == "error"
    assert {"nan": "not finite", "error": "the step failed: RuntimeError: out of memory"}[fault] in str(
        failed.error
    )
    assert len(events["plain 30"]) == 40
    assert watched.loop.stats().num_used_blocks == 0


@pytest.mark.parametrize("gpus", [1, 2])
def test_on_devices_pieces_are_what_all_would_be_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """A chunk of 128 rows is two pieces of 64, for which the head's kernel is the one of 128."""
    told = []
    for rows in (64, 1000):
        monkeypatch.setattr(loop_module, "PROMPT_LOGIT_ROWS", rows)
        monkeypatch.setattr(indices_module, "PROMPT_LOGIT_ROWS", rows)
        engine = start(path, monkeypatch, gpus=gpus, context_tokens=256, chunk_tokens=128)
        engine.add(scoring("a", prompt_of(150, tiny.VOCAB, seed=1)))
        told.append(told_of(run_engine(engine, [])))
        assert len(runner_of(engine)._logits) == min(rows, 128)
        engine.close()
    assert told[0] == told[1]


def test_the_plan_counts_the_rows_that_there_may_be() -> None:
    """151,936 logits of 4 bytes: of 64 rows of prompts, of each answer, or of each answer's draft too."""
    source = DummySource("dummy:qwen3-30b-a3b")
    machine = Machine(8, 64 << 30, 60 << 30)

    def scratch(**options: object) -> int:
        return plan(machine, source, RunOptions(**options)).scratch_bytes  # type: ignore[arg-type]

    row = 4 * 151936
    assert scratch() > 64 * row
    assert scratch(parallel=8) == scratch() + 7 * row
    assert scratch(parallel=8, speculate="ngram") == scratch() + (8 * 17 - 1) * row
    assert scratch(parallel=1024) == scratch() + 511 * row  # no more than a step has
