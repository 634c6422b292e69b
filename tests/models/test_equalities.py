"""What exact_batching promises, bit for bit (design 1.6), and what holds without it.

Weights are in a block format (int8 products) with the down projections in BF16, so that both kinds of
product take part; the cache is bf16 as in use, or q8_0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from isthmus import native
from isthmus.formats.kv_cache import KvDtype
from isthmus.models.base import Model
from models import tiny
from models.steps import Session, chunked, load, prompt_of, whole

PROMPTS = [prompt_of(length, tiny.VOCAB, seed) for seed, length in enumerate([70, 9, 41])]
FAMILIES = ["llama3-tied", "mixtral", "qwen2moe", "qwen3moe", "deepseek-v2-lite", "deepseek-v3"]
FAMILIES += ["glm4moe", "minimax-m2", "gpt-oss"]


def mixed(name: str, values: np.ndarray) -> GgmlType:
    if not tiny.is_quantised(name, values):
        return GgmlType.F32
    return GgmlType.BF16 if "down" in name or values.shape[-1] % 32 else GgmlType.Q8_0


@dataclass(frozen=True)
class Written:
    path: Path
    kv_dtype: KvDtype


@pytest.fixture(params=[*FAMILIES, "qwen3moe q8_0", "deepseek-v3 q8_0"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    family, _, kv_dtype = request.param.partition(" ")
    case = tiny.CASES[family]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case), mixed)
    return Written(path, kv_dtype or "bf16")


@pytest.fixture
def exact(written: Written) -> Model:
    return load(written.path, exact_batching=True, kv_dtype=written.kv_dtype)


def test_chunked_is_stepwise_is_whole(exact: Model) -> None:
    wanted = whole(exact, PROMPTS[0])
    for sizes in ([1], [64, 6], [33, 1, 7]):
        assert torch.equal(chunked(exact, PROMPTS[0], sizes), wanted), sizes


def test_batched_is_alone(exact: Model) -> None:
    """Three sequences in one step, then a chunk of one beside decodes of the others."""
    session = Session(exact, len(PROMPTS))
    heads = [prompt[:-4] for prompt in PROMPTS]
    first = session.step(list(enumerate(heads)))
    second = session.step([(2, PROMPTS[2][-4:]), (0, PROMPTS[0][-4:-3]), (1, PROMPTS[1][-4:-3])])
    for sequence, prompt in enumerate(PROMPTS):
        alone = whole(exact, prompt)
        together = torch.cat([first[sequence], second[[1, 2, 0][sequence]]])
        assert torch.equal(together, alone[: len(together)]), sequence


def test_every_instruction_set_and_thread_count_gives_the_same_bits(exact: Model) -> None:
    wanted = whole(exact, PROMPTS[2])
    for isa in native.isa_names():
        native.use_isa(isa)
        for threads in (1, 2, 3):
            native.set_threads(threads)
            assert torch.equal(whole(exact, PROMPTS[2]), wanted), (isa, threads)


def test_without_exact_batching_logits_stay_close(written: Written) -> None:
    """Two drivers, each within 5e-3 of the float product (test_quantised.py): twice that between them."""
    model = load(written.path, kv_dtype=written.kv_dtype)
    wanted = whole(model, PROMPTS[0]).log_softmax(-1)
    stepwise = chunked(model, PROMPTS[0], [1]).log_softmax(-1)
    kl = (wanted.exp() * (wanted - stepwise)).sum(-1).mean()
    assert kl <= 2 * 5e-3
