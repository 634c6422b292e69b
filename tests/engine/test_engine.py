"""The engine over a real file: what it says it loaded is what it loaded."""

from pathlib import Path

import pytest
import torch

from isthmus import native
from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Output, Request, SamplingParams
from isthmus.errors import ContextLengthError, NotEnoughMemoryError, UsageError
from isthmus.formats.kv_cache import KV_DTYPES, KvDtype
from isthmus.placement.machine import Machine

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def answer(engine: Engine, prompt: str) -> str:
    engine.add(Request("a", list(prompt.encode()), GREEDY))
    events: list[Output] = []
    while engine.has_work:
        events += engine.step()
    return bytes(event.token for event in events if event.token is not None).decode()


def test_it_answers_and_says_what_it_is(alphabet_model: Path) -> None:
    engine = Engine(alphabet_model, RunOptions(context_tokens=200, threads=1, isa="scalar"))
    assert answer(engine, "abc") == "defg"
    info = engine.info
    assert (info.name, info.architecture, info.vocab_size) == ("alphabet", "llama", 260)
    assert (info.context_tokens, info.isa, info.threads) == (200, "scalar", 1)
    with pytest.raises(ContextLengthError, match="a context of 200 takes 199"):
        answer(engine, "a" * 200)
    engine.close()


@pytest.mark.parametrize(("threads", "nodes"), [(1, 2), (3, 2), (4, 3), (7, 4), (33, 1), (64, 4)])
def test_threads_and_nodes_do_not_change_an_answer(alphabet_model: Path, threads: int, nodes: int) -> None:
    engine = Engine(alphabet_model, RunOptions(threads=threads, fake_numa=nodes))
    assert (engine.info.threads, engine.info.nodes) == (threads, min(threads, nodes))
    assert engine.info.nodes_reason == ""  # nothing was measured
    assert answer(engine, "the alphabet from a to m") == "nopq"


def test_torch_keeps_one_thread_after_loading(alphabet_model: Path) -> None:
    torch.set_num_threads(2)
    Engine(alphabet_model).close()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_plans_cache_is_the_caches_size(alphabet_model: Path, kv_dtype: KvDtype) -> None:
    """The plan reads the header, the state asks the model: two ways to one number."""
    engine = Engine(alphabet_model, RunOptions(context_tokens=100, kv_dtype=kv_dtype))
    layers = engine._executor.state.layers  # type: ignore[attr-defined]
    allocated = sum(cache.keys.nbytes + cache.values.nbytes for cache in layers)
    assert (
        allocated == engine.info.kv_bytes == engine.plan.kv_token_bytes * 2 * BLOCK_TOKENS
    )  # 100 tokens: 2 blocks


def test_progress_ends_at_all_bytes(alphabet_model: Path) -> None:
    seen: list[tuple[int, int]] = []
    Engine(alphabet_model, progress=lambda done, total: seen.append((done, total))).close()
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    done, total = seen[-1]
    assert done == total == 1_038_080  # the tensors' bytes, as in the header


def test_chunks_of_any_size_give_the_same_answer(alphabet_model: Path) -> None:
    for chunk in (1, 3, 64):
        engine = Engine(alphabet_model, RunOptions(chunk_tokens=chunk, exact_batching=True))
        assert answer(engine, "the alphabet from a to m") == "nopq"


def test_an_instruction_set_the_cpu_lacks_is_a_usage_error(
    alphabet_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(name: str) -> None:
        raise ValueError(f"no {name}")

    monkeypatch.setattr(native, "use_isa", lacking)
    with pytest.raises(UsageError, match=r"instruction set 'amx' was asked for; this CPU runs .*scalar"):
        Engine(alphabet_model, RunOptions(isa="amx"))


def test_what_does_not_fit_is_refused_before_any_weight_is_read(
    alphabet_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Machine, "detect", lambda: Machine(cores=2, total_bytes=1 << 20, available_bytes=1 << 20)
    )
    monkeypatch.setattr("isthmus.engine.loading.load_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(NotEnoughMemoryError, match=r"needs 0\.5 GiB .* 0\.0 GiB are available"):
        Engine(alphabet_model)


def test_statistics_tell_what_the_experts_operators_counted(
    alphabet_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(alphabet_model, RunOptions(threads=1))
    before = engine.stats()
    assert answer(engine, "abc") == "defg"
    after = engine.stats()
    assert after.expert_read_bytes == before.expert_read_bytes  # a dense model has no experts
    assert after.expert_seconds == before.expert_seconds
    monkeypatch.setattr(native, "expert_reads", lambda: (7, 2_500_000_000))
    assert (engine.stats().expert_read_bytes, engine.stats().expert_seconds) == (7, 2.5)
    engine.close()
