"""A step's indices on a device: what is copied, how static buffers are filled, whose rows are nobody's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.config import BLOCK_TOKENS
from isthmus.modules.on_gpu.step import CHUNK_ROWS, DeviceStep, DeviceSteps
from isthmus.modules.on_gpu.target import Target
from models import devices, tiny
from models.steps import Session, prompt_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")

FIELDS = ("tokens", "positions", "sequences", "slots", "logit_rows", "block_tables")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tiny.CASES["qwen3moe"]
    return tiny.write_case(tmp_path_factory.mktemp("step") / "tiny.gguf", case, tiny.build(case))


def session_of(path: Path) -> Session:
    """Four sequences with prompts of 1, 2, 3 and 4 tokens behind them."""
    session = Session(devices.resident(path), 4)
    session.step([(i, prompt_of(i + 1, tiny.VOCAB, i)) for i in range(4)])
    return session


def test_chunks_stand_alone(path: Path) -> None:
    session, target = session_of(path), Target.of("cpu")
    pieces = [(0, [1]), (1, [2] * CHUNK_ROWS), (2, [3] * (CHUNK_ROWS - 1)), (3, [4])]
    batch = session.batch(pieces)
    step = DeviceStep(batch.prepare(tiny.VOCAB, session.state.num_blocks), target)
    for name in FIELDS:
        assert torch.equal(getattr(step, name), getattr(batch, name))
        assert getattr(step, name).data_ptr() % 16 == step.tokens.data_ptr() % 16
    assert [(part.begin, part.end, part.chunk is not None) for part in step.parts] == [
        (0, 1, False),
        (1, 1 + CHUNK_ROWS, True),
        (1 + CHUNK_ROWS, 1 + 2 * CHUNK_ROWS, False),
    ]
    chunk = step.parts[1].chunk
    assert chunk is not None
    assert chunk.starts.tolist() == [0, CHUNK_ROWS]
    assert chunk.num_keys == 2 + CHUNK_ROWS  # two are in the cache
    assert torch.equal(chunk.block_table[0], batch.block_tables[1])
    assert step.parts[2].sequences.tolist() == [2] * (CHUNK_ROWS - 1) + [3]


def test_a_filled_step_is_the_batch_and_nobodys_rows(path: Path) -> None:
    session = session_of(path)
    static = DeviceStep.for_decodes(4, 5, Target.of("cpu"))
    addresses = {name: getattr(static, name).data_ptr() for name in FIELDS}
    for pieces in ([(0, [7]), (1, [8]), (2, [9]), (3, [10])], [(0, [5]), (1, [6])]):
        batch = session.batch(pieces)
        static.fill(batch.prepare(tiny.VOCAB, session.state.num_blocks))
        rows, width = len(pieces), batch.block_tables.shape[1]
        for name in ("tokens", "positions", "sequences", "slots"):
            assert torch.equal(getattr(static, name)[:rows], getattr(batch, name))
        assert torch.equal(static.block_tables[:rows, :width], batch.block_tables[:rows])
        assert not static.block_tables[rows:].any()
        assert static.positions[rows:].tolist() == [-1] * (4 - rows)
        assert static.sequences.tolist() == static.logit_rows.tolist() == [0, 1, 2, 3]
        assert {name: getattr(static, name).data_ptr() for name in FIELDS} == addresses
    assert static.end_position == 5 * BLOCK_TOKENS


def test_a_static_step_computes_what_a_copied_one_does(path: Path) -> None:
    """Bit for bit with the bucket full; nobody's rows beside them change no cache."""
    eager, static = session_of(path), session_of(path)
    target = static.model.stages[0].target  # type: ignore[attr-defined]
    step = DeviceStep.for_decodes(4, static.tables.shape[1], target)
    steps = DeviceSteps({target: step})
    for pieces in ([(0, [7]), (1, [8]), (2, [9]), (3, [10])], [(i, [11 + i]) for i in range(4)]):
        step.fill(static.batch(pieces).prepare(tiny.VOCAB, static.state.num_blocks))
        with torch.inference_mode():
            logits = static.model.compute(steps, static.state)
        assert torch.equal(logits, torch.cat(eager.step(pieces)))
    step.fill(static.batch([(0, [3])]).prepare(tiny.VOCAB, static.state.num_blocks))
    with torch.inference_mode():
        logits = static.model.compute(steps, static.state)
    assert devices.distance(logits[:1], eager.step([(0, [3])])[0]) < 1e-2  # torch's products vary with rows
    assert logits.isfinite().all()
    for mine, theirs in zip(static.state.layers, eager.state.layers, strict=True):
        written = mine.keys.float() - theirs.keys.float()  # type: ignore[attr-defined]
        assert written.abs().max() < 0.1


def test_a_batch_that_does_not_fit_is_refused(path: Path) -> None:
    session = session_of(path)
    static = DeviceStep.for_decodes(2, 3, Target.of("cpu"))
    for pieces in ([(0, [1]), (1, [1]), (2, [1])], [(0, [1, 2])]):
        step = session.batch(pieces).prepare(tiny.VOCAB, session.state.num_blocks)
        with pytest.raises(ValueError, match="this step takes decodes of up to 2 and 3"):
            static.fill(step)


def test_a_position_past_the_tables_is_refused(path: Path) -> None:
    """Kernels trust positions: a step that could hold one past the rope tables (512 positions) fails."""
    model = devices.resident(path)
    session = Session(model, 1)
    target = model.stages[0].target  # type: ignore[attr-defined]
    steps = DeviceSteps({target: DeviceStep.for_decodes(1, 9, target)})
    with pytest.raises(ValueError, match="position 575 of a run of 512 positions"), torch.inference_mode():
        model.compute(steps, session.state)
