"""A planned step's rows as lists of numbers: a record takes them as they are, other steps as tensors.

A decode's few rows never become tensors: a step's weights have pushed torch's code out of the caches, and its
first calls take longer than everything here.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import chain

import torch

from isthmus.config import PROMPT_LOGIT_ROWS
from isthmus.engine.batch import Batch, looks_like_decode
from isthmus.engine.scheduler import StepPlan


@dataclass(slots=True)
class Indices:
    """T rows of S sequences, as the fields of `Batch`; the tables line after line."""

    tokens: list[int]  # [T]
    positions: list[int]  # [T]
    sequences: list[int]  # [T]
    slots: list[int]  # [T]
    block_tables: list[int]  # [S * max_blocks]
    num_sequences: int
    logit_rows: list[int]  # [R]
    sampled: list[int]  # [T]
    copies: list[tuple[int, int]]
    project_later: bool = False

    @property
    def is_like_decode(self) -> bool:
        return looks_like_decode(self.logit_rows, self.sequences)

    def batch(self) -> Batch:
        """The same as int32 tensors, parts of one: made one by one they take four times as long."""
        parts = (self.tokens, self.positions, self.sequences, self.slots, self.sampled, self.logit_rows)
        joined = torch.frombuffer(array("i", chain(*parts, self.block_tables)), dtype=torch.int32)
        of_rows = joined.split_with_sizes([*map(len, parts), len(self.block_tables)])
        return Batch(
            tokens=of_rows[0],
            positions=of_rows[1],
            sequences=of_rows[2],
            slots=of_rows[3],
            sampled=of_rows[4],
            logit_rows=of_rows[5],
            block_tables=of_rows[6].view(self.num_sequences, -1),
            project_later=self.project_later,
            copies=tuple(self.copies),
        )


def indices_of(plan: StepPlan, block_tokens: int, table_width: int = 0) -> Indices:
    """The rows of all slices, slice after slice.

    table_width: blocks in a line of the tables, 0: as many as the longest sequence has.
    """
    width = table_width or max(len(part.sequence.blocks) for part in plan.slices)
    of = Indices([], [], [], [], [], len(plan.slices), [], [], [])
    for line, part in enumerate(plan.slices):
        blocks, places = part.sequence.blocks, range(part.start, part.start + part.num_rows)
        of.tokens += part.tokens
        of.positions += places
        of.sequences += [line] * len(places)
        of.slots += [blocks[at // block_tokens] * block_tokens + at % block_tokens for at in places]
        of.sampled += [at >= part.sequence.num_prompt_tokens for at in places]
        of.block_tables += blocks
        of.block_tables += [0] * (width - len(blocks))
        of.logit_rows += range(len(of.tokens) - part.num_logits, len(of.tokens))
        if part.source is not None:
            of.copies.append((part.source, blocks[part.start // block_tokens]))
    of.project_later = plan.tells_prompts and len(of.logit_rows) > PROMPT_LOGIT_ROWS
    return of
