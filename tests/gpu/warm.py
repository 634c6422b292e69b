"""What steps of a model would make triton compile after its warm-up, by what triton tells apart: constants,
options, types, pointers and sizes that are multiples of 16. On memory that does not exist.

A kernel is either interpreted or compiled in a process, so this is a program: prints [model, options, kernels
of the warm-up, those of them that read a cache of q8_0, what is new after it] as a line of JSON each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from gpu_parts import ahead
from isthmus.config import RunOptions
from isthmus.engine.batch import Batch

MODELS = ("dummy:tiny-qwen3moe", "dummy:tiny-deepseek2")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"kv_dtype": "q8_0"}, {"exact_batching": True})


def batch(pieces: Sequence[tuple[int, int]], width: int, logits: Sequence[int]) -> Batch:
    """pieces: of each sequence its first position and its rows; logits: the rows that want them."""
    position = torch.cat([torch.arange(first, first + rows) for first, rows in pieces]).int()
    line = torch.repeat_interleave(
        torch.arange(len(pieces)), torch.tensor([rows for _, rows in pieces])
    ).int()
    tables = torch.arange(width, dtype=torch.int32).repeat(len(pieces), 1)
    return Batch(
        tokens=torch.zeros_like(position),
        positions=position,
        sequences=line,
        slots=position.clone(),
        block_tables=tables,
        logit_rows=torch.tensor(logits, dtype=torch.int32),
    )


# Prompts whole, gone on with, beside answers under way, and several at once; sizes are multiples of nothing.
STEPS: list[tuple[list[tuple[int, int]], list[int]]] = [
    *(([(0, rows)], [rows - 1]) for rows in (3, 31, 33, 63, 100, 257, 300, 511)),
    ([(512, 77)], []),
    ([(70, 1), (5, 1), (0, 100)], [0, 1]),
    ([(9, 1), (130, 1), (64, 50), (0, 41)], [0, 1, 51, 92]),
    ([(0, 5), (0, 9), (3, 1)], [4, 13, 14]),
    ([(0, 300), (7, 1)], [299, 300]),
]


def main() -> None:
    for model in MODELS:
        for options in OPTIONS:
            job = ahead.Job(model, RunOptions(parallel=4, chunk_tokens=512, **options))
            found: dict[Any, Any] = {}
            with ahead.imagined(job, found) as made:
                made.warm_up(job.options)
                warm = dict(found)
                for pieces, logits in STEPS:
                    made.prefill(batch(pieces, made.width, logits))
            of_q8_0 = [args for kernel, args, *_ in warm.values() if _reads_q8_0(kernel, args)]
            new = [str(key) for key in found if key not in warm]
            print(json.dumps([model, options, len(warm), len(of_q8_0), new]), flush=True)


def _reads_q8_0(kernel: Any, args: tuple[Any, ...]) -> bool:
    return bool(kernel.fn.__name__ == "_decode_split" and args[1].dtype == torch.uint8)


if __name__ == "__main__":
    main()
