"""A decode step that runs from its record gives the bits of the model's own code, and says when it cannot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.engine.captured import ALIGNMENT, CapturedStep, StepMemory
from isthmus.models.base import Model
from models import tiny
from models.steps import Session, indices, load, prompt_of

# Cached tokens before the first decode: the second sequence's third decode begins its second block.
PROMPTS = [prompt_of(length, tiny.VOCAB, seed) for seed, length in enumerate([9, 62, 70])]
FAMILIES = ["llama3-tied", "mixtral", "qwen2", "qwen2moe", "qwen3moe", "deepseek-v2-lite", "deepseek-v3"]
FAMILIES += ["glm4moe", "minimax-m2", "ernie4_5-moe", "gpt-oss"]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    case = tiny.CASES[request.param]
    return load(tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case)), kv_dtype="bf16")


def prefilled(model: Model, prompts: list[list[int]]) -> Session:
    session = Session(model, len(prompts))
    session.step(list(enumerate(prompts)))
    return session


Run = Callable[[Session, list[list[int]]], list[Tensor]]  # the logits of each step's tokens


def decode(model: Model, sequences: int, run: Run) -> list[Tensor]:
    """What `run` makes of six decodes of the first so many prompts, and the caches it leaves."""
    session = prefilled(model, PROMPTS[:sequences])
    logits = run(session, [prompt_of(sequences, tiny.VOCAB, seed) for seed in range(20, 26)])
    return logits + [cache for layer in session.state.layers for cache in vars(layer).values()]


def by_the_model(session: Session, tokens: list[list[int]]) -> list[Tensor]:
    return [torch.cat(session.step([(i, [token]) for i, token in enumerate(step)])) for step in tokens]


def from_the_record(session: Session, tokens: list[list[int]]) -> list[Tensor]:
    batches = (session.batch([(i, [token]) for i, token in enumerate(step)]) for step in tokens)
    with torch.inference_mode():
        captured = CapturedStep(session.model, session.state, next(batches), StepMemory())
        assert captured.foreign == []
        return [captured.logits.clone(), *(captured(indices(batch)).clone() for batch in batches)]


@pytest.mark.parametrize("sequences", [1, 3])
def test_six_decodes_and_their_caches_are_the_models(model: Model, sequences: int) -> None:
    wanted = decode(model, sequences, by_the_model)
    got = decode(model, sequences, from_the_record)
    assert len(got) == len(wanted) > 6
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture
def qwen(tmp_path: Path) -> Model:
    case = tiny.CASES["qwen3moe"]
    return load(tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case)))


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x * 2, "mul"),
        (lambda x: x[:, torch.tensor([0, 1])], "__getitem__"),
        (lambda x: torch.from_numpy(x.numpy() * 2), "numpy"),
        (lambda x: x.t().contiguous().t(), "contiguous"),
        (lambda x: x if x.sum() > 0 else x.clone(), "sum"),
    ],
)
def test_a_model_that_uses_torch_is_not_captured(
    qwen: Model, monkeypatch: pytest.MonkeyPatch, compute: Callable[[Tensor], Tensor], name: str
) -> None:
    plain = qwen.head  # type: ignore[attr-defined]
    monkeypatch.setattr(qwen, "head", lambda x: compute(plain(x)))
    session = prefilled(qwen, PROMPTS[:1])
    with torch.inference_mode():
        captured = CapturedStep(qwen, session.state, session.batch([(0, [1])]), StepMemory())
    assert name in captured.foreign


def test_watching_imports_nothing() -> None:
    """torch's own dispatch modes import sympy and 900 modules, which takes 3 s of the first answer."""
    code = (
        "import torch, sys; from isthmus.engine.captured import StepMemory, _Watch\n"
        "before = set(sys.modules)\n"
        "with torch.inference_mode(), _Watch(StepMemory()): torch.empty(2, 3)[1:].view(-1)\n"
        "print(len(set(sys.modules) - before), 'sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout.split() == [b"0", b"False"]


def test_an_index_outside_the_caches_fails_its_step_and_the_next_one_runs(qwen: Model) -> None:
    session = prefilled(qwen, PROMPTS[:1])
    with torch.inference_mode():
        captured = CapturedStep(qwen, session.state, session.batch([(0, [1])]), StepMemory())
        bad, good = session.batch([(0, [2])]), session.batch([(0, [3])])
        bad.slots[0] = 1 << 20
        with pytest.raises(ValueError, match="row 0: slot 1048576 is outside"):
            captured(indices(bad))
        assert torch.isfinite(captured(indices(good))).all()


def test_another_number_of_rows_cannot_take_the_place(qwen: Model) -> None:
    session = prefilled(qwen, PROMPTS[:2])
    with torch.inference_mode():
        captured = CapturedStep(qwen, session.state, session.batch([(0, [1])]), StepMemory())
        with pytest.raises(ValueError, match="2 rows cannot take the place of 1"):
            captured(indices(session.batch([(0, [2]), (1, [2])])))


def test_layers_share_the_memory_of_a_step(qwen: Model) -> None:
    """Of two layers all temporaries but the logits are free again, and a second record needs no more."""
    session, memory = prefilled(qwen, PROMPTS[:1]), StepMemory()
    with torch.inference_mode():
        first = CapturedStep(qwen, session.state, session.batch([(0, [1])]), memory)
        taken = memory.free_bytes
        second = CapturedStep(qwen, session.state, session.batch([(0, [1])]), memory)
        assert memory.free_bytes <= taken
        assert first.logits.data_ptr() != second.logits.data_ptr()


def test_memory_is_lent_while_any_tensor_over_it_lives() -> None:
    memory = StepMemory()
    first = memory.empty((3, 5), torch.float32)
    view, address = first[1:], first.data_ptr()
    assert address % ALIGNMENT == 0
    del first
    other = memory.empty((3, 5), torch.float32)
    assert other.data_ptr() != address
    del view
    again = memory.empty((7,), torch.int32)
    assert again.data_ptr() == address
    assert memory.empty((0, 4), torch.float32).shape == (0, 4)
