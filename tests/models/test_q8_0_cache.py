"""What a cache of q8_0 makes of a model: logits within what its rounding explains, and no further.

The bound. The largest of 32 normal values is 2.35 of their std in the mean, so a step is 2.35 / 127 and its
rounding r = 2.35 / 127 / sqrt(12) = 0.0053 of the values' std, at random. An attention's output is off by r
of itself through the values, and by r times the scores' std (about 1 in these models) through the keys: by
r sqrt(2) in a layer, r sqrt(2 L) in all, the logits by at most twice that. Logits of std s that are off by
e s, at random, have a KL of (e s)^2 / 2: with e = 2 r sqrt(2 L), 4 L r^2 s^2. bf16 rounds a third as much
(by 2^-8 sqrt(1/3) of a value at most), so its KL is a tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.formats.kv_cache import KvDtype, row_bytes
from isthmus.models.base import Model
from models import devices, routing, tiny
from models.steps import Session, load, prompt_of, whole

ROUNDING = 2.35 / 127 / 12**0.5
PROMPT = prompt_of(96, tiny.VOCAB, seed=5)


def kl(wanted: Tensor, got: Tensor) -> float:
    one, other = wanted.log_softmax(-1), got.log_softmax(-1)
    return float((one.exp() * (one - other)).sum(-1).mean())


def bound(logits: Tensor, layers: int) -> float:
    return 4 * layers * ROUNDING**2 * float(logits.std(-1).square().mean())


@pytest.mark.parametrize("exact_batching", [True, False])
@pytest.mark.parametrize("family", ["llama3-tied", "mixtral", "qwen3moe", "deepseek-v2-lite", "deepseek-v3"])
def test_logits_are_off_by_what_the_rounding_explains(
    family: str, exact_batching: bool, tmp_path: Path
) -> None:
    """exact_batching absorbs latents in every row; without it a prompt's are expanded."""
    case = tiny.CASES[family]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))

    def made(kv_dtype: KvDtype) -> Tensor:
        return whole(
            routing.replay(load(path, kv_dtype=kv_dtype, exact_batching=exact_batching), routes), PROMPT
        )

    reference = load(path, exact_batching=exact_batching)
    routes = routing.recorded(reference)
    wanted = whole(reference, PROMPT)
    most = bound(wanted, len(reference.layers))  # type: ignore[attr-defined]
    bf16, q8_0 = kl(wanted, made("bf16")), kl(wanted, made("q8_0"))
    print(f"{family}: KL {q8_0:.1e} of at most {most:.1e}; bf16 {bf16:.1e}")
    assert bf16 < q8_0 <= most


@pytest.mark.parametrize("exact_batching", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3moe", "deepseek-v3"])
def test_on_a_device_they_are_the_cpus_but_for_bf16(
    family: str, exact_batching: bool, tmp_path: Path
) -> None:
    """Chunks, pieces and decodes on a stand-in, against the CPU's q8_0, its cache of fp32 and the device's of
    bf16: a root of a KL is a distance, so the rounding's and that of the device's own bf16 at most add up."""
    case = tiny.CASES[family]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.round_to_bf16(tiny.build(case)))
    reference = load(path, exact_batching=exact_batching)
    routes = devices.recorded(reference)
    wanted = devices.run(reference)
    cpu = load(path, exact_batching=exact_batching, kv_dtype="q8_0")
    cpus = devices.run(devices.replayed(cpu, routes))

    def made(kv_dtype: KvDtype) -> Tensor:
        model = devices.resident(path, exact=exact_batching, kv_dtype=kv_dtype)
        return devices.run(devices.replayed(model, routes))

    bf16, q8_0 = made("bf16"), made("q8_0")
    most = (bound(wanted, len(reference.layers)) ** 0.5 + kl(wanted, bf16) ** 0.5) ** 2  # type: ignore[attr-defined]
    print(f"{family}: KL {kl(wanted, q8_0):.1e} of at most {most:.1e}; bf16 {kl(wanted, bf16):.1e}")
    assert max(kl(wanted, q8_0), kl(bf16, q8_0)) <= most
    assert devices.distance(q8_0, cpus) <= devices.BOUND
    assert not torch.equal(q8_0, bf16)


@pytest.mark.parametrize("where", [load, devices.resident], ids=["cpu", "device"])
@pytest.mark.parametrize("family", ["llama", "deepseek-v2-lite"])
def test_the_bound_tells_a_wrong_cache(family: str, where: Callable[..., Model], tmp_path: Path) -> None:
    """The codes of one layer moved by one column: more than ten times the bound."""
    case = tiny.CASES[family]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))
    logits = []
    for wrong in (False, True):
        model = where(path, kv_dtype="q8_0")
        session = Session(model, 1)
        session.step([(0, PROMPT[:-1])])
        kind = model.state_spec()[0]
        width = getattr(kind, "width", 0) or kind.head_dim  # type: ignore[attr-defined]
        (cache, *_) = vars(session.state.layers[0]).values()
        assert cache.shape[-1] == 64 * row_bytes("q8_0", width)
        if wrong:
            codes = cache[..., : 64 * width]
            codes.copy_(codes.roll(1, -1))
        logits += session.step([(0, PROMPT[-1:])])
    assert kl(*logits) > 10 * bound(logits[0], len(model.layers))  # type: ignore[attr-defined]
