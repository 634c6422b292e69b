"""`isthmus pack`: where the cache goes, that later commands use it, and what stands in its way."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from cli.forked import Command
from cli.terminal import TIMEOUT_S, environment, isthmus
from isthmus.weights.packed_path import cache_path


@pytest.fixture
def model(tmp_path: Path, alphabet_model: Path) -> Path:
    return Path(shutil.copy(alphabet_model, tmp_path / "model.gguf"))


def test_packed_once_checked_and_run_from_it(tmp_path: Path, model: Path) -> None:
    cache = {"ISTHMUS_CACHE": str(tmp_path / "cache")}
    done = isthmus("pack", model, **cache)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.parent == tmp_path / "cache" / "packed"
    assert path.name.startswith("model-")
    assert "packed 0.00 GB" in done.stderr
    checked = isthmus("pack", model, "--check", **cache)
    assert (checked.returncode, checked.stdout.strip()) == (0, str(path)), checked.stderr
    ran = isthmus("run", model, "abc", "--raw", "--temperature", "0", "--max-tokens", "3", **cache)
    assert (ran.returncode, ran.stdout) == (0, "def\n"), ran.stderr

    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    damaged = isthmus("pack", model, "--check", **cache)
    assert damaged.returncode == 1
    message = rf"error: {re.escape(str(path))}: the packed cache is damaged in tensor \S+\.weight"
    assert re.search(message, damaged.stderr), damaged.stderr


def test_check_without_a_cache_is_an_error(tmp_path: Path, model: Path) -> None:
    done = isthmus("pack", model, "--check", ISTHMUS_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert "cannot be opened: No such file or directory" in done.stderr


def test_a_cache_folder_that_is_none_is_an_error_with_advice(tmp_path: Path, model: Path) -> None:
    done = isthmus("run", model, "abc", "--raw", "--packed-cache", ISTHMUS_CACHE=str(model))
    assert done.returncode == 1
    assert "cannot write the packed cache" in done.stderr
    assert "set ISTHMUS_CACHE to a folder that can take it" in done.stderr


def test_an_interrupt_is_one_line_and_leaves_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the command waits for another process that has the lock, so surely before its end."""
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "packed"
    folder.mkdir(parents=True)
    lock = folder / (cache_path(model).name + ".lock")
    with lock.open("w") as held, (tmp_path / "said").open("w+") as said:
        fcntl.flock(held, fcntl.LOCK_EX)
        ends = {"stdin": said.fileno(), "stdout": said.fileno(), "stderr": said.fileno()}
        process = Command("pack", model, env=environment(ISTHMUS_CACHE=str(tmp_path / "cache")), **ends)
        try:
            wait_until_blocked(process.pid)
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 130
        finally:
            process.kill()
    text = (tmp_path / "said").read_text()
    assert text == "interrupted: no packed cache was made; one that was there is still there\n"
    assert [*folder.iterdir()] == [lock]


def wait_until_blocked(pid: int) -> None:
    """Until the kernel lists it as waiting for a lock on a file."""
    deadline = time.monotonic() + TIMEOUT_S
    while not re.search(rf"-> FLOCK .* {pid} ", Path("/proc/locks").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
