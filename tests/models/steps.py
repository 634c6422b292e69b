"""Runs a model the way an engine would: sequences in scattered blocks, in steps of any mix of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine.batch import Batch
from isthmus.engine.captured import CapturedStep, StepMemory
from isthmus.engine.indices import Indices
from isthmus.engine.state import State
from isthmus.models.base import Model, load_model
from isthmus.weights.source import open_weights

Prompt = Sequence[int]


def load(path: Path, **options: Any) -> Model:
    """The model, its cache in fp32 unless asked otherwise, so that nothing but the model differs from the
    oracle.
    """
    return load_model(open_weights(path), RunOptions(**({"threads": 2, "kv_dtype": "f32"} | options)))


class Session:
    """A model with a state for `sequences` prompts; `step` feeds pieces of them and returns those rows'
    logits.
    """

    def __init__(self, model: Model, sequences: int, max_tokens: int = 3 * BLOCK_TOKENS) -> None:
        self.model = model
        blocks = sequences * -(-max_tokens // BLOCK_TOKENS)
        self.state = State(model.state_spec(), blocks, model.kv_dtype)
        scattered = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).int()
        self.tables = scattered.view(sequences, -1)
        self.lengths = [0] * sequences

    def batch(self, pieces: Sequence[tuple[int, Prompt]]) -> Batch:
        """pieces: (sequence, its next tokens); the rows of a step that wants all their logits."""
        tokens, positions, lines = [], [], []
        for sequence, piece in pieces:
            start = self.lengths[sequence]
            tokens += piece
            positions += range(start, start + len(piece))
            lines += [sequence] * len(piece)
            self.lengths[sequence] += len(piece)
        position, line = torch.tensor(positions).int(), torch.tensor(lines).int()
        blocks = self.tables[line, position // BLOCK_TOKENS]
        return Batch(
            tokens=torch.tensor(tokens).int(),
            positions=position,
            sequences=line,
            slots=(blocks * BLOCK_TOKENS + position % BLOCK_TOKENS).int(),
            block_tables=self.tables,
            logit_rows=torch.arange(len(tokens)).int(),
        )

    def step(self, pieces: Sequence[tuple[int, Prompt]]) -> list[Tensor]:
        """Logits [tokens, vocab] for each piece."""
        batch = self.batch(pieces)
        with torch.inference_mode():
            logits = self.model.forward(batch, self.state)
        return list(logits.split([len(piece) for _, piece in pieces]))


def indices(batch: Batch) -> Indices:
    """The same as a record takes it."""
    return Indices(
        tokens=batch.tokens.tolist(),
        positions=batch.positions.tolist(),
        sequences=batch.sequences.tolist(),
        slots=batch.slots.tolist(),
        block_tables=batch.block_tables.flatten().tolist(),
        num_sequences=len(batch.block_tables),
        logit_rows=batch.logit_rows.tolist(),
        sampled=[] if batch.sampled is None else batch.sampled.tolist(),
        copies=list(batch.copies),
    )


def whole(model: Model, prompt: Prompt) -> Tensor:
    """Logits [tokens, vocab] of a prompt in one step."""
    return Session(model, 1, len(prompt)).step([(0, prompt)])[0]


def chunked(model: Model, prompt: Prompt, sizes: Sequence[int]) -> Tensor:
    """The same in chunks of these sizes, the last one repeated."""
    session, done, parts = Session(model, 1, len(prompt)), 0, []
    while done < len(prompt):
        size = sizes[min(len(parts), len(sizes) - 1)]
        parts += session.step([(0, prompt[done : done + size])])
        done += size
    return torch.cat(parts)


def prompt_of(length: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_and_recorded(model: Model, prompts: Sequence[Prompt], decodes: int) -> list[Tensor]:
    """Logits of a prefill of all prompts at once, of decodes by the model, and of one from a record."""
    session = Session(model, len(prompts))
    logits = session.step(list(enumerate(prompts)))
    for token in range(decodes):
        logits += session.step([(i, [token + i]) for i in range(len(prompts))])
    with torch.inference_mode():
        captured = CapturedStep(model, session.state, session.batch([(0, [1])]), StepMemory())
        assert captured.foreign == []
        logits += [captured.logits.clone(), captured(indices(session.batch([(0, [2])]))).clone()]
    return logits
