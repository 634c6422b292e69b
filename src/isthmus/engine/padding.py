"""A step becomes a decode of a number of rows for which there is a captured one.

A CUDA graph runs for as many rows as it was captured with, so a decode of 3 sequences becomes one of 4. The
fourth row repeats one of the three - token, position, block table - but writes its key and value to the
spare block: it chooses the experts that are read for that row anyway, so it costs the CPU no byte of weights.
Nobody looks at its logits.

A draft's rows are verified in the same graphs: attention on a device knows of a row no more than its position
and its block table, and all rows of a layer are in the cache before one of them is read. So each may as well
be of a sequence of its own, with the same table: buckets of (sequences x draft length) are not needed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from isthmus.config import BLOCK_TOKENS, MAX_CAPTURED_ROWS
from isthmus.engine.batch import Batch
from isthmus.native.handoff import slot_rows


def bucket_of(num_rows: int) -> int:
    """The power of two that so many rows are filled up to."""
    assert 1 <= num_rows <= MAX_CAPTURED_ROWS <= BLOCK_TOKENS  # a slot of the spare block for each
    return slot_rows(num_rows)  # the hand-off's slots are of as many


def each_its_own(batch: Batch) -> Batch:
    """`batch`, of which all rows want logits, as a decode: a line of the block tables for each row."""
    if batch.is_decode:
        return batch
    every = torch.arange(batch.num_rows, dtype=torch.int32)
    return replace(batch, sequences=every, block_tables=batch.block_tables[batch.sequences.long()])


def padded(batch: Batch, rows: int, spare_block: int) -> Batch:
    """`batch`, a decode of at most `rows` sequences; its rows in turn fill the places left over."""
    count = batch.num_rows
    if count == rows:
        return batch
    source = torch.arange(rows) % count
    every = torch.arange(rows, dtype=torch.int32)
    spare = spare_block * BLOCK_TOKENS + every[count:]
    return Batch(
        tokens=batch.tokens[source],
        positions=batch.positions[source],
        sequences=every,
        slots=torch.cat([batch.slots, spare]),
        block_tables=batch.block_tables[source],
        logit_rows=every,
        sampled=None if batch.sampled is None else batch.sampled[source],
    )
