"""A planned step as tensors: two sequences of blocks, row by row."""

from dataclasses import fields

import torch

from isthmus.engine.indices import indices_of
from isthmus.engine.request import Request
from isthmus.engine.scheduler import Sequence, SequenceSlice, StepPlan


def test_a_mixed_step_row_by_row() -> None:
    """Blocks of 4 tokens: "a" decodes token 5, "b" computes tokens 2 to 4 of a prompt of 9."""
    a = Sequence(Request("a", [10, 11, 12, 13, 14]), 12, tokens=[10, 11, 12, 13, 14, 99], blocks=[7, 2, 5])
    b = Sequence(Request("b", list(range(20, 29))), 12, tokens=list(range(20, 29)), blocks=[3, 0])
    batch = indices_of(StepPlan((SequenceSlice(a, 5, 1), SequenceSlice(b, 2, 3))), block_tokens=4).batch()

    assert batch.tokens.tolist() == [99, 22, 23, 24]
    assert batch.positions.tolist() == [5, 2, 3, 4]
    assert batch.sequences.tolist() == [0, 1, 1, 1]
    assert batch.slots.tolist() == [2 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 0 * 4 + 0]
    assert batch.block_tables.tolist() == [[7, 2, 5], [3, 0, 0]]  # padded with any valid block
    assert batch.logit_rows.tolist() == [0]  # b's prompt goes on, so none of its rows


def test_all_fields_are_what_native_code_takes() -> None:
    a = Sequence(Request("a", [1, 2, 3]), 64, tokens=[1, 2, 3], blocks=[1])
    batch = indices_of(StepPlan((SequenceSlice(a, 0, 3),)), block_tokens=64).batch()
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        if field.name in ("project_later", "copies"):
            continue
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def test_a_draft_is_rows_after_its_sequence_and_runs_as_a_decode() -> None:
    a = Sequence(Request("a", [10, 11]), 12, tokens=[10, 11, 99], blocks=[7, 2])
    b = Sequence(Request("b", [20]), 12, tokens=[20], blocks=[3])
    batch = indices_of(
        StepPlan((SequenceSlice(a, 2, 1, (50, 51)), SequenceSlice(b, 0, 1))), block_tokens=4
    ).batch()
    assert batch.tokens.tolist() == [99, 50, 51, 20]
    assert batch.slots.tolist() == [7 * 4 + 2, 7 * 4 + 3, 2 * 4 + 0, 3 * 4 + 0]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3]
    assert batch.is_like_decode
    assert not batch.is_decode


def test_a_chunk_is_not_like_a_decode_even_if_all_its_logits_are_wanted() -> None:
    for rows, alike in ((31, True), (32, False)):
        a = Sequence(Request("a", [1] * rows), 64, tokens=[1] * rows, blocks=[1])
        part = SequenceSlice(a, 0, rows, all_logits=True)
        assert indices_of(StepPlan((part,)), block_tokens=64).batch().is_like_decode == alike
