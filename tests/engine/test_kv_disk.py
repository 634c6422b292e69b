"""The cache on disk: what is read back is what was written, or it is computed anew."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from isthmus.config import BLOCK_TOKENS, RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.kv_disk import KvDisk
from isthmus.engine.request import Request, SamplingParams
from isthmus.engine.state import PagedKeyValue, PagedLatent, State
from isthmus.errors import UsageError

ORIGIN, DIGEST = bytes(32), bytes(range(32))
TOKENS = tuple(range(BLOCK_TOKENS))


def filled(seed: int = 1) -> State:
    """Two layers of two kinds, three blocks, random bits."""
    state = State([PagedKeyValue(2, 8), PagedLatent(24)], 3, "bf16")
    torch.manual_seed(seed)
    for layer in state.layers:
        for tensor in vars(layer).values():
            tensor.copy_(torch.randn(tensor.shape))
    return state


def bits(state: State, block: int) -> list[torch.Tensor]:
    return [t[block].view(torch.int16).clone() for layer in state.layers for t in vars(layer).values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def the_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.kv")
    return path


def test_a_block_comes_back_in_another_place_of_another_process(tmp_path: Path) -> None:
    state = filled()
    KvDisk(tmp_path, ORIGIN, state, 1 << 20).store(DIGEST, TOKENS, 1)
    assert the_file(tmp_path).stat().st_mode & 0o077 == 0  # what users wrote is nobody else's
    later = filled(seed=2)
    untouched = bits(later, 0)
    disk = KvDisk(tmp_path, ORIGIN, later, 1 << 20)
    assert disk.holds(DIGEST)
    assert disk.fetch(DIGEST, TOKENS, 2)
    assert same(bits(later, 2), bits(state, 1))
    assert same(bits(later, 0), untouched)


@pytest.mark.parametrize("at", [0, 8, 40, 100, 150, 400, -1])
def test_a_file_with_one_wrong_bit_is_not_used(tmp_path: Path, at: int) -> None:
    disk = KvDisk(tmp_path, ORIGIN, filled(), 1 << 20)
    disk.store(DIGEST, TOKENS, 1)
    data = bytearray(the_file(tmp_path).read_bytes())
    data[at] ^= 1
    the_file(tmp_path).write_bytes(data)
    assert not disk.fetch(DIGEST, TOKENS, 2)
    assert not disk.holds(DIGEST)
    assert not list(tmp_path.rglob("*.kv"))


def test_a_file_of_other_tokens_cut_short_or_gone_is_not_used(tmp_path: Path) -> None:
    disk = KvDisk(tmp_path, ORIGIN, filled(), 1 << 20)
    for spoil in ("tokens", "short", "gone"):
        disk.store(DIGEST, TOKENS, 1)
        path = the_file(tmp_path)
        if spoil == "short":
            os.truncate(path, path.stat().st_size - 1)
        if spoil == "gone":
            path.unlink()
        tokens = TOKENS[::-1] if spoil == "tokens" else TOKENS
        assert not disk.fetch(DIGEST, tokens, 2), spoil


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    KvDisk(tmp_path, ORIGIN, filled(), 1 << 20).store(DIGEST, TOKENS, 1)
    assert not KvDisk(tmp_path, bytes([1] * 32), filled(), 1 << 20).holds(DIGEST)


def test_the_longest_unused_is_deleted_when_the_folder_is_full(tmp_path: Path) -> None:
    disk = KvDisk(tmp_path, ORIGIN, filled(), 1 << 30)
    digests = [bytes([n] * 32) for n in range(4)]
    disk.store(digests[0], TOKENS, 0)
    size = the_file(tmp_path).stat().st_size
    disk = KvDisk(tmp_path, ORIGIN, filled(), 3 * size)
    disk.store(digests[1], TOKENS, 0)
    disk.store(digests[2], TOKENS, 0)
    assert disk.fetch(digests[0], TOKENS, 2)
    disk.store(digests[3], TOKENS, 0)
    assert [disk.holds(digest) for digest in digests] == [True, False, True, True]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) == 3 * size


def test_a_full_disk_ends_keeping_not_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = KvDisk(tmp_path, ORIGIN, filled(), 1 << 20)

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    disk.store(DIGEST, TOKENS, 1)
    disk.store(bytes(32), TOKENS, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"kv_disk: nothing more is kept in {disk._folder}: No space left on device"
    ]
    assert not any(tmp_path.rglob("*.*"))  # no half of a file


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"kv_disk: .* cannot be used: Not a directory"):
        KvDisk(tmp_path / "file", ORIGIN, filled(), 1 << 20)


def test_a_prompt_outlives_the_engine(alphabet_model: Path, tmp_path: Path) -> None:
    """150 tokens: two full blocks are read by the next engine, and its answer has the same bits."""
    options = RunOptions(context_tokens=256, exact_batching=True, kv_disk=str(tmp_path / "kv"))
    prompt = (b"abcdefghijklmnopqrstuvwxyz" * 6)[:150]
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=20)
    answers = []
    for cached in (0, 128):
        engine = Engine(alphabet_model, options)
        engine.add(Request("a", list(prompt), params))
        events = []
        while engine.has_work:
            events += engine.step()
        engine.close()
        assert events[0].num_cached_tokens == cached
        answers.append([(event.token, event.logprob) for event in events])
    assert answers[0] == answers[1]
